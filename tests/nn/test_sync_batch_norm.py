"""SyncBatchNorm on parts of a batch is BatchNorm on the whole batch, in one process."""

from __future__ import annotations

import copy
import logging
import pickle
import threading
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils._pytree import tree_map

import lockstep
from lockstep import SyncBatchNorm
from lockstep.nn import sync_batch_norm
from tests.counts import num_examples, pairs
from tests.nn.batch_norm import CHANNELS, batches
from tests.ranks import BACKENDS, Backend, run_ranks
from tests.same import assert_same

KINDS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}


def passes_of(norm: nn.Module, parts: list[torch.Tensor]) -> dict[str, list[torch.Tensor]]:
    """What comes of a forward and a backward for each part, one after the other."""
    outputs, gradients = [], []
    for part in parts:
        part = part.clone().requires_grad_()
        output = norm(part)
        # Sums, whose gradients add up over ranks; and not of the output alone, or they are 0.
        (output.square() * part.sigmoid()).sum().backward()
        outputs.append(output.detach())
        gradients.append(part.grad)
    return {
        "outputs": outputs,
        "input gradients": gradients,
        "parameter gradients": [p.grad for p in norm.parameters()],
        "buffers": [buffer.clone() for buffer in norm.buffers()],
    }


def assert_norm_is_that_of_one_process(
    oracle: nn.Module, wholes: list[list[torch.Tensor]], backend: Backend = "threads"
) -> None:
    plain = copy.deepcopy(oracle)

    def body(rank: int, group: dist.ProcessGroup) -> dict[str, list[torch.Tensor]]:
        norm = SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain), group)
        return passes_of(norm, [parts[rank] for parts in wholes])

    ranks = run_ranks(len(wholes[0]), body, backend=backend)
    expected = passes_of(oracle, [torch.cat(parts) for parts in wholes])
    for what in ("outputs", "input gradients"):
        for index, whole in enumerate(expected[what]):
            together = torch.cat([rank[what][index] for rank in ranks])
            torch.testing.assert_close(together, whole, rtol=1e-10, atol=1e-10)
    sums = [sum(parts) for parts in zip(*(r["parameter gradients"] for r in ranks), strict=True)]
    torch.testing.assert_close(sums, expected["parameter gradients"], rtol=1e-10, atol=1e-10)
    for rank in ranks:
        torch.testing.assert_close(rank["buffers"], expected["buffers"], rtol=1e-12, atol=1e-12)
        assert tree_map(torch.Tensor.tolist, rank["buffers"]) == tree_map(
            torch.Tensor.tolist, ranks[0]["buffers"]
        )


@pairs(
    "shape, sizes, backend",
    [(), (5,), (2, 3), (2, 1, 3)],
    [[4, 4], [1, 6], [5, 0], [2, 0, 3, 1]],
    BACKENDS,
)
def test_values_and_gradients_are_those_of_the_whole_batch(
    shape: tuple[int, ...], sizes: list[int], backend: Backend
) -> None:
    oracle = KINDS[2 + len(shape)](CHANNELS, dtype=torch.float64)
    with torch.no_grad():
        oracle.weight.copy_(torch.tensor([0.5, -2.0, 1.0]))
        oracle.bias.copy_(torch.tensor([1.0, 0.0, -1.0]))
    assert_norm_is_that_of_one_process(oracle, batches(shape, sizes), backend)


@settings(deadline=None, max_examples=num_examples(30))
@given(
    sizes=st.lists(st.integers(0, 4), min_size=1, max_size=4).filter(lambda sizes: sum(sizes) > 1),
    shape=st.lists(st.integers(1, 3), max_size=3).map(tuple),
    affine=st.booleans(),
    tracks=st.booleans(),
    momentum=st.sampled_from([None, 0.1, 1.0]),
    eps=st.sampled_from([1e-5, 0.1]),
)
def test_every_option_is_batch_norms(sizes, shape, affine, tracks, momentum, eps) -> None:
    options = {"affine": affine, "track_running_stats": tracks, "momentum": momentum, "eps": eps}
    oracle = KINDS[2 + len(shape)](CHANNELS, dtype=torch.float64, **options)
    assert_norm_is_that_of_one_process(oracle, batches(shape, sizes))


def test_channels_last_stays_channels_last() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> bool:
        norm = SyncBatchNorm(CHANNELS, process_group=group)
        image = torch.randn(2, CHANNELS, 4, 4).to(memory_format=torch.channels_last)
        return norm(image).is_contiguous(memory_format=torch.channels_last)

    assert run_ranks(2, body) == [True, True]


@pytest.mark.parametrize("converts", [False, True], ids=["inputs", "the module too"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_normalised_in_float32(dtype: torch.dtype, converts: bool) -> None:
    (parts,) = batches((4, 4), [3, 5], count=1)

    def body(rank: int, group: dist.ProcessGroup) -> tuple[torch.Tensor, torch.Tensor]:
        norm = SyncBatchNorm(CHANNELS, process_group=group, dtype=dtype if converts else None)
        part = parts[rank].to(dtype).requires_grad_()
        output = norm(part)
        (output.float().square() * part.float().sigmoid()).sum().backward()
        assert output.dtype == part.grad.dtype == dtype
        assert norm.weight.grad.dtype == norm.running_var.dtype == norm.weight.dtype
        return output.detach(), part.grad

    whole = torch.cat(parts).to(dtype).float().requires_grad_()
    expected = nn.BatchNorm2d(CHANNELS)(whole)
    (expected.square() * whole.sigmoid()).sum().backward()
    outputs, gradients = zip(*run_ranks(2, body), strict=True)
    slack = {"rtol": 0.02, "atol": 0.02}
    torch.testing.assert_close(torch.cat(outputs).float(), expected.detach(), **slack)
    torch.testing.assert_close(torch.cat(gradients).float(), whole.grad, **slack)


class Rectified(nn.BatchNorm1d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).relu()


@pytest.mark.parametrize("shape", [(0, CHANNELS), (0, CHANNELS, 2), (2, CHANNELS, 0)])
def test_a_global_batch_without_values_is_batch_norms(shape: tuple[int, ...]) -> None:
    wholes = [[torch.zeros(shape).double()] * 2] * 2
    assert_norm_is_that_of_one_process(nn.BatchNorm1d(CHANNELS).double(), wholes)


def test_copies_have_the_same_group() -> None:
    first = nn.Linear(2, CHANNELS)

    def body(world: lockstep.World) -> None:
        group = dist.new_group([0, 1])
        model = nn.Sequential(copy.deepcopy(first), nn.BatchNorm1d(CHANNELS), Rectified(CHANNELS))
        model = SyncBatchNorm.convert_sync_batchnorm(model.double(), group)
        wrapped = lockstep.DistributedDataParallel(copy.deepcopy(model))
        averaged = AveragedModel(model).module
        x = torch.arange(6.0).view(3, 2).double() + world.rank
        expected = model(x)
        copies = [copy.deepcopy(model), copy.deepcopy(wrapped), copy.deepcopy(averaged)]
        for one in (*copies, copy.copy(model[1]), pickle.loads(pickle.dumps(model[:1]))):
            for part in one.modules():
                assert getattr(part, "process_group", group) in (group, world.process_group)
        for one in copies:
            assert_same(one(x), expected)
        with pytest.raises(RuntimeError, match="a process group of its own"):
            pickle.dumps(model)
        model = SyncBatchNorm.convert_sync_batchnorm(model, dist.group.WORLD)
        loaded = pickle.loads(pickle.dumps(model))
        assert loaded[1].process_group is loaded[2].process_group is None  # all ranks
        assert_same(loaded(x), expected)

    lockstep.launch(body, 2, ranks="threads")


def test_evaluation_without_running_statistics_is_told_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    both = threading.Barrier(2)

    def with_the_other(record: logging.LogRecord) -> bool:
        with suppress(threading.BrokenBarrierError):
            both.wait(0.2)  # seconds, in which the other rank would say the same
        return True

    def body(rank: int, group: dist.ProcessGroup) -> None:
        norm = SyncBatchNorm(CHANNELS, track_running_stats=False, process_group=group).eval()
        x = torch.arange(4.0 * CHANNELS).view(4, CHANNELS) * (rank + 1)
        plain = nn.BatchNorm1d(CHANNELS, track_running_stats=False)
        for _ in range(2):
            torch.testing.assert_close(norm(x), plain(x))

    monkeypatch.setattr(sync_batch_norm, "_told_of_local_statistics", threading.Lock())
    monkeypatch.setattr(sync_batch_norm._log, "filters", [with_the_other])
    run_ranks(2, body)
    (record,) = caplog.records
    assert "each rank normalises by the statistics of its own samples" in record.message


def test_evaluation_uses_the_running_statistics_and_no_other_rank() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        norm = SyncBatchNorm(CHANNELS, process_group=group).eval()
        if rank == 0:  # the other isn't there
            image = torch.randn(2, CHANNELS, 4)
            torch.testing.assert_close(norm(image), nn.BatchNorm1d(CHANNELS).eval()(image))

    run_ranks(2, body)


def test_alone_it_is_batch_norm() -> None:
    image = torch.randn(4, CHANNELS)
    ours, theirs = SyncBatchNorm(CHANNELS), nn.BatchNorm1d(CHANNELS)
    assert torch.equal(ours(image), theirs(image))
    assert torch.equal(ours.running_var, theirs.running_var)


def test_a_model_trains_as_in_one_process() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3), nn.BatchNorm2d(2),
        nn.Flatten(), nn.Linear(2 * 4 * 4, 3),
    ).double()  # fmt: skip
    whole = [torch.randn(9, 1, 8, 8, dtype=torch.float64) for _ in range(4)]

    def steps(model: nn.Module, batches: list[torch.Tensor], factor: float) -> list[torch.Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        for batch in batches:
            optimizer.zero_grad()
            (model(batch).square().sum() * factor).backward()
            optimizer.step()
        return [p.detach().clone() for p in [*model.parameters(), *model.buffers()]]

    def body(rank: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
        converted = SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(model), group)
        lockstep.parallelize(converted, process_group=group)
        return steps(converted, [batch.split([5, 0, 4])[rank] for batch in whole], 3 / 9)

    for ours in run_ranks(3, body):
        torch.testing.assert_close(
            ours, steps(copy.deepcopy(model), whole, 1 / 9), rtol=1e-10, atol=1e-10
        )


# Conversion.


def test_conversion_keeps_parameters_statistics_and_sharing() -> None:
    shared = nn.BatchNorm1d(CHANNELS, eps=0.1, momentum=None)
    model = nn.Sequential(shared, nn.Linear(CHANNELS, CHANNELS), shared, nn.BatchNorm1d(2).eval())
    weight, mean, keys = shared.weight, shared.running_mean, list(model.state_dict())
    assert SyncBatchNorm.convert_sync_batchnorm(model) is model
    assert isinstance(model[0], SyncBatchNorm)
    assert model[0] is model[2]
    assert (model[0].eps, model[0].momentum) == (0.1, None)
    assert model[0].weight is weight
    assert model[0].running_mean is mean
    assert [model[0].training, model[3].training] == [True, False]
    assert list(model.state_dict()) == keys


def test_conversion_of_a_batch_norm_returns_what_takes_its_place() -> None:
    norm = SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm2d(4, affine=False))
    assert isinstance(norm, SyncBatchNorm)
    assert norm.weight is None


# Bad input.


def test_one_value_per_channel_is_refused_on_every_rank() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        norm = SyncBatchNorm(CHANNELS, process_group=group)
        with pytest.raises(ValueError, match="have one value per channel"):
            norm(torch.randn(1 - rank, CHANNELS))

    run_ranks(2, body)


@pytest.mark.parametrize(
    ("shape", "says"),
    [((5,), r"inputs of shape \(N, C, \*\)"), ((2, 5), "for 3 channels, and got 5")],
)
def test_an_input_of_another_shape_is_refused(shape: tuple[int, ...], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        SyncBatchNorm(CHANNELS)(torch.randn(shape))


class Branching(nn.Module):
    """A layer that not every rank uses, behind a SyncBatchNorm."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4, bias=False)
        self.norm = SyncBatchNorm(4, affine=False, process_group=group)
        self.third = nn.Linear(4, 1, bias=False)

    def forward(self, x: torch.Tensor, *, uses_second: bool) -> torch.Tensor:
        x = self.first(x)
        return self.third(self.norm(self.second(x) if uses_second else x))


@pytest.mark.parametrize("backend", BACKENDS)
def test_ranks_may_have_different_gradients_before_its_sum(backend: Backend) -> None:
    """Where a layer isn't used, its bucket is full earlier than on the other ranks."""

    def body(rank: int, group: dist.ProcessGroup) -> torch.Tensor:
        model = lockstep.parallelize(
            Branching(group).double(), process_group=group, bucket_cap_mb=60 / 2**20
        )
        for _ in range(4):
            model.zero_grad()
            x = torch.randn(5, 4, dtype=torch.float64)
            model(x, uses_second=rank == 0).square().sum().backward()
        return model.third.weight.grad

    first, second = run_ranks(2, body, backend=backend, group_timeout_seconds=10)
    assert torch.equal(first, second)


@pytest.mark.parametrize("backend", BACKENDS)
def test_ranks_may_reach_other_models_before_its_sum(backend: Backend) -> None:
    """Rank 0 asks at the head's gradients which models are reached, rank 1 has no head."""

    def body(rank: int, group: dist.ProcessGroup) -> torch.Tensor:
        norm = SyncBatchNorm(3, process_group=group)
        base = lockstep.parallelize(nn.Sequential(nn.Linear(2, 3), norm), process_group=group)
        head = lockstep.parallelize(nn.Linear(3, 1), process_group=group)
        for _ in range(3):
            output = base(torch.randn(4, 2))
            (head(output) if rank == 0 else output.square()).sum().backward()
        return head.weight.grad

    first, second = run_ranks(2, body, backend=backend, group_timeout_seconds=10)
    assert torch.equal(first, second)


class NormAndActivation(nn.BatchNorm2d):
    """As those of timm: with an activation, and a forward that takes more."""

    def __init__(self, num_features: int, way: str) -> None:
        super().__init__(num_features, eps=0.01, momentum=None if way == "mean" else 0.3)
        self.way = way
        self.drop = nn.Identity()
        self.calls = 0

    def forward(self, x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
        self.calls += 1
        if self.way == "itself":
            self.num_batches_tracked.add_(1)
            x = nn.functional.batch_norm(
                x,
                self.running_mean,
                self.running_var,
                self.weight,
                self.bias,
                training=self.training,
                momentum=self.momentum,
                eps=self.eps,
            )
        else:
            x = super().forward(x)
        return self.drop(x.relu() * scale)

    def twice(self) -> float:
        return 2 * self.eps


@pytest.mark.parametrize("way", ["through its base", "mean", "itself"])
def test_what_a_class_derived_from_batch_norm_does_it_does_still(way: str) -> None:
    oracle = NormAndActivation(CHANNELS, way).double()
    nn.init.uniform_(oracle.weight)
    assert_norm_is_that_of_one_process(oracle, batches((2, 3), [3, 1, 2]))


def test_a_class_derived_from_batch_norm_stays_what_it_is() -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 1), NormAndActivation(3, "itself"))
    norm, state = model[1], list(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert SyncBatchNorm.convert_sync_batchnorm(model) is model
    assert isinstance(model[1], NormAndActivation)
    assert isinstance(model[1], SyncBatchNorm)
    assert model[1].weight is norm.weight is optimizer.param_groups[0]["params"][2]
    assert list(model.state_dict()) == state
    assert model[1].twice() == 0.02
    x = torch.randn(4, 3, 2, 2)
    expected = NormAndActivation(3, "itself")(x, scale=3.0)
    for one in (model[1], copy.deepcopy(model[1]), pickle.loads(pickle.dumps(model[1]))):
        assert isinstance(one, SyncBatchNorm)
        assert torch.equal(one(x, scale=3.0), expected)
    again = SyncBatchNorm.convert_sync_batchnorm(model)[1]
    assert isinstance(again, NormAndActivation)


def test_a_derived_class_that_normalises_in_its_own_way_is_refused_by_name() -> None:
    class OwnWay(nn.BatchNorm1d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x - x.mean(0)) / x.std(0)

    def body(rank: int, group: dist.ProcessGroup) -> None:
        norm = SyncBatchNorm.convert_sync_batchnorm(OwnWay(3), group)
        with pytest.raises(TypeError, match=r"OwnWay.* doesn't call.*batch_norm"):
            norm(torch.randn(4, 3))
        norm.eval()(torch.randn(4, 3))

    run_ranks(2, body)


def test_a_batch_norm_without_a_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="LazyBatchNorm1d has no shape yet"):
        SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.LazyBatchNorm1d()))


def compiled_and_not(world: lockstep.World) -> list[torch.Tensor]:
    norm = SyncBatchNorm.convert_sync_batchnorm(NormAndActivation(3, "itself"))
    x = torch.arange(12.0).view(4, 3) * (world.rank + 1)
    return [torch.compile(copy.deepcopy(norm), backend="eager")(x), norm(x)]


def test_a_converted_class_can_be_compiled() -> None:
    for compiled, plain in lockstep.launch(compiled_and_not, 2, ranks="threads"):
        assert torch.equal(compiled, plain)


def test_a_class_of_two_norms_runs_both_forwards() -> None:
    class Doubled(nn.BatchNorm1d):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(input)

    class Both(SyncBatchNorm, Doubled):
        pass

    norm, x = Both(CHANNELS).eval(), torch.randn(4, CHANNELS)
    torch.testing.assert_close(norm(x), 2 * nn.BatchNorm1d(CHANNELS).eval()(x))
