"""Buffers: whose values they follow, when, and when they are left alone."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import lockstep
from lockstep.errors import ModelError
from tests.nn.parallel import BOTH
from tests.ranks import BACKENDS, Backend, run_ranks


def test_buffers_follow_rank_0_with_each_backward() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        mine = lockstep.parallelize(model, process_group=group)
        for _ in range(3):
            mine(torch.randn(4, 3) + rank).sum().backward()
        return [b.clone() for b in model.buffers()]

    first, *others = run_ranks(3, body)
    for buffers in others:
        assert all(torch.equal(a, b) for a, b in zip(first, buffers, strict=True))
    assert first[0].abs().sum() > 0


def test_buffers_that_are_set_anew_follow_too() -> None:
    class Average(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)
            self.register_buffer("mean", torch.zeros(3))
            self.register_buffer("count", torch.zeros((), dtype=torch.int16))
            self.register_buffer("flags", torch.zeros(5, dtype=torch.bool))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
            self.count = self.count + 1 + len(x) % 2
            return self.layer(x)

    def body(rank: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
        model = lockstep.parallelize(Average(), process_group=group)
        for _ in range(3):
            model(torch.randn(4 + rank, 3)).sum().backward()
        return [*model.buffers()]

    first, second = run_ranks(2, body)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert first[1] == 3


def test_buffers_that_are_recomputed_in_backward_follow_too() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        mine = lockstep.parallelize(model, process_group=group)
        for _ in range(3):
            x = torch.randn(4, 3) + rank
            checkpoint(mine, x, use_reentrant=False, preserve_rng_state=False).sum().backward()
        return [b.clone() for b in model.buffers()]

    first, second = run_ranks(2, body)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_buffers_stay_apart_if_asked_to() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> torch.Tensor:
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        mine = lockstep.parallelize(model, process_group=group, broadcast_buffers=False)
        mine(torch.randn(4, 3) + rank).sum().backward()
        return model[1].running_mean

    assert not torch.equal(*run_ranks(2, body))


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_two_forwards_with_batch_norm_then_two_backwards(mode: str) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        mine = getattr(lockstep.parallelize(model, process_group=group), mode)()
        losses = [mine(torch.randn(4, 3) + rank).sum() for _ in range(2)]
        for loss in losses:
            loss.backward()

    run_ranks(2, body)


class Statistics(nn.Module):
    """A buffer of each kind, which forward fills with the rank."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.inner = nn.Module()
        for name in ("followed", "averaged", "late", "local"):
            self.inner.register_buffer(name, torch.zeros(2))
        self.inner.register_buffer("averaged_count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor, value: int) -> torch.Tensor:
        with torch.no_grad():
            for buffer in self.inner.buffers():
                buffer.fill_(value)
        return self.layer(x)


@BOTH
def test_each_buffer_has_its_policy(parallel) -> None:
    policies = {"*.averaged*": "mean", "*.late": "late", "*.local": "local"}

    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = Statistics()
        mine = parallel(model, group, broadcast_buffers=policies)
        mine(torch.ones(1, 3), rank + 1).sum().backward()
        seen = {name: buffer.tolist() for name, buffer in model.inner.named_buffers()}
        assert seen == {
            "followed": [1, 1],
            "averaged": [2, 2],
            "late": [rank + 1, rank + 1],
            "local": [rank + 1, rank + 1],
            "averaged_count": 1,
        }
        lockstep.sync_buffers(mine)
        assert model.inner.late.tolist() == [2, 2]
        assert model.inner.local.tolist() == [rank + 1, rank + 1]

    run_ranks(3, body)


def test_buffers_deep_in_a_parallel_part_have_the_policies_of_that_part() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        part = lockstep.parallelize(
            nn.Sequential(Statistics()), process_group=group, broadcast_buffers={"*": "local"}
        )
        model = lockstep.parallelize(nn.Sequential(part, nn.Linear(3, 1)), process_group=group)
        model[1](part[0](torch.ones(1, 3), rank + 1)).sum().backward()
        assert part[0].inner.followed.tolist() == [rank + 1, rank + 1]

    run_ranks(2, body)


@BOTH
def test_a_policy_that_does_not_exist_is_refused(parallel) -> None:
    with pytest.raises(ValueError, match=r"'sum' for '\*', but must have one of 'rank0', 'mean'"):
        parallel(Statistics(), None, broadcast_buffers={"*": "sum"})


class Scaled(nn.Module):
    """A buffer that the backward needs, and that some forwards change before they use it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3).double()
        self.register_buffer("scale", torch.ones(3, dtype=torch.float64))

    def forward(self, x: torch.Tensor, scale: float | None = None) -> torch.Tensor:
        if scale is not None:
            self.scale.fill_(scale)
        return self.layer(x) * self.scale


@pytest.mark.parametrize(("policy", "value"), [("rank0", 1), ("mean", 1.5)])
def test_a_buffer_that_autograd_has_saved_is_left_alone(policy: str, value: float) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        policies = {"scale": policy}
        model = lockstep.parallelize(Scaled(), process_group=group, broadcast_buffers=policies)
        x = torch.ones(1, 3, dtype=torch.float64)
        earlier = model.layer(x).sum()
        later = model(x, scale=rank + 1.0).sum()
        earlier.backward()  # other buffers come, while this rank's are still needed
        assert model.scale.tolist() == [rank + 1] * 3
        model.zero_grad()
        later.backward()
        assert model.layer.bias.grad.tolist() == [1.5] * 3  # the mean of 1 and 2
        assert model.scale.tolist() == [value] * 3

    run_ranks(2, body)


def test_a_rank_may_evaluate_alone() -> None:
    """Nothing is exchanged in a forward, so nobody has to come along."""

    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        mine = lockstep.DistributedDataParallel(model, process_group=group)
        mine(torch.randn(4, 3)).sum().backward()
        if rank == 0:
            for mode in (mine.eval(), mine.train()):
                with torch.no_grad():
                    mode(torch.randn(4, 3))
        mine(torch.randn(4, 3)).sum().backward()

    run_ranks(2, body)


class Holding(nn.Module):
    """A layer, and what else a model may hold."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        for name, tensor in tensors.items():
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(name, tensor)
            else:
                self.register_buffer(name, tensor)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def inference_tensor() -> torch.Tensor:
    with torch.inference_mode():
        return torch.zeros(3)


FORMS = {
    "with a stride": lambda: torch.zeros(4, 3)[:, 1],
    "every second": lambda: torch.zeros(8)[::2],
    "transposed": lambda: torch.zeros(4, 3).t(),
    "expanded": lambda: torch.zeros(1).expand(5),
    "expanded within": lambda: torch.zeros(2, 1, 3).expand(2, 4, 3),
    "conjugated": lambda: torch.zeros(3, dtype=torch.cfloat).conj(),
    "negated": lambda: torch.zeros(3, dtype=torch.cfloat).conj().imag,
    "of inference mode": inference_tensor,
    "empty": lambda: torch.zeros(0, 3),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["rank0", "mean", "parameter", "frozen"])
@pytest.mark.parametrize("form", FORMS)
def test_tensors_of_every_form_are_kept_alike(form: str, kind: str, backend: Backend) -> None:
    if form == "of inference mode" and kind == "parameter":
        return  # torch refuses it

    def body(rank: int, group: dist.ProcessGroup) -> torch.Tensor:
        tensor = FORMS[form]()
        if kind in ("parameter", "frozen"):
            tensor = nn.Parameter(tensor, requires_grad=kind == "parameter")
        model = Holding(held=tensor)
        with torch.inference_mode(tensor.is_inference()):
            # Of an expanded one all numbers are one.
            model.held.detach().data[(0,) * tensor.dim() if tensor.numel() else ...] = rank + 1
        policy = {"held": kind} if kind in ("rank0", "mean") else True
        lockstep.parallelize(model, process_group=group, broadcast_buffers=policy)
        assert not tensor.numel() or model.held.detach().abs().max() == 1
        if kind in ("rank0", "mean"):
            with torch.inference_mode(tensor.is_inference()):
                model.held.data[(0,) * tensor.dim() if tensor.numel() else ...] = 3 + rank
            model(torch.ones(1, 2)).sum().backward()
            expected = 3.5 if kind == "mean" else 3
            assert not tensor.numel() or model.held.abs().max() == expected
        return model.held.detach().clone()

    first, second = run_ranks(2, body, backend=backend)
    assert torch.equal(first, second)


class Viewing(Holding):
    def __init__(self) -> None:
        super().__init__(held=torch.zeros(4))
        self.view = self.held[:2]


def test_a_buffer_of_which_there_is_a_view_follows() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = lockstep.parallelize(Viewing(), process_group=group)
        for step in range(3):
            model.held.fill_(10 * step + rank)
            model(torch.ones(1, 2)).sum().backward()
            assert model.held.tolist() == [10 * step] * 4
            assert model.view.tolist() == [10 * step] * 2

    run_ranks(2, body)


def test_a_backward_that_needs_an_earlier_value_of_a_view_is_refused() -> None:
    """As with torch's own wrapper: it would compute with what rank 0 holds by now."""

    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = lockstep.parallelize(Viewing(), process_group=group)
        model.held.fill_(rank)
        leaf = torch.ones(2, requires_grad=True)
        kept = (leaf * model.view).sum()
        model(torch.ones(1, 2)).sum().backward()
        assert model.view.tolist() == [0, 0]
        if rank == 0:
            kept.backward()
        else:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                kept.backward()

    run_ranks(2, body)


def test_a_buffer_that_is_held_later_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = lockstep.parallelize(Holding(held=torch.zeros(4)), process_group=group)
        view = model.held[:2]
        for _ in range(12):
            model.held.fill_(rank)
            model(torch.ones(1, 2)).sum().backward()
        assert model.held.tolist() == [rank] * 4
        del view
        model(torch.ones(1, 2)).sum().backward()
        assert model.held.tolist() == [0] * 4

    run_ranks(2, body)
    said = [r.getMessage() for r in caplog.records if "has not been kept alike" in r.getMessage()]
    assert len(said) == 1  # by rank 1, which was to follow
    assert "The buffer 'held' has not been kept alike on all ranks in the last 10" in said[0]


def test_a_buffer_that_is_held_now_and_then_is_not_told_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = lockstep.parallelize(Holding(held=torch.zeros(4)), process_group=group)
        for _ in range(3):
            view = model.held[:2]
            for _ in range(6):
                model(torch.ones(1, 2)).sum().backward()
            del view
            model(torch.ones(1, 2)).sum().backward()

    run_ranks(2, body)
    assert not [r for r in caplog.records if "has not been kept alike" in r.getMessage()]


@pytest.mark.filterwarnings("ignore:.torch.jit")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("how", ["scripted", "traced"])
def test_buffers_of_scripted_modules_follow(how: str) -> None:
    def make() -> nn.Module:
        part = nn.BatchNorm1d(2)
        return (
            torch.jit.script(part) if how == "scripted" else torch.jit.trace(part, torch.ones(3, 2))
        )

    made = [make(), make()]

    def body(rank: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
        model = nn.Sequential(made[rank], nn.Linear(2, 1))
        lockstep.parallelize(model, process_group=group)
        for step in range(3):
            model(torch.arange(6.0).view(3, 2) * (1 + rank + step)).sum().backward()
        return [model[0].running_mean.clone(), model[0].weight.grad]

    first, second = run_ranks(2, body)
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("grad_dtype", [torch.float32, None], ids=str)
def test_gradients_of_another_dtype_than_their_parameters(grad_dtype: torch.dtype | None) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> torch.Tensor:
        weight = nn.Parameter(torch.ones(5, 4, dtype=torch.bfloat16))
        weight.grad_dtype = grad_dtype
        model = lockstep.parallelize(Holding(weight=weight), process_group=group)
        for _ in range(2):
            model.zero_grad()
            (weight.float() * (1 + rank * 2**-7)).sum().backward()
        assert weight.grad.dtype == (grad_dtype or torch.bfloat16)
        return weight.grad

    first, second = run_ranks(2, body)
    assert torch.equal(first, second)
    # The mean takes a bit more than bfloat16 has.
    assert first[0, 0] == 1 + 2**-8 if grad_dtype else first[0, 0] in (1, 1 + 2**-7)


def test_parameters_that_are_swapped_for_others_are_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """torch would put them into the model without their hooks, so that no gradient is reduced."""

    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = lockstep.parallelize(nn.Linear(2, 1), process_group=group)
        with pytest.raises(RuntimeError, match=r"Couldn't swap Linear\.weight"):
            model.double()

    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        run_ranks(2, body)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2  # by each rank, before any conversion
    assert all("refuses to convert this Linear" in message for message in said)


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_parameters_that_are_computed_are_refused_by_name() -> None:
    """As those of a copy of a scripted module are: no gradient is ever added to them."""
    part = torch.jit.script(nn.BatchNorm1d(2))
    made = [copy.deepcopy(part), copy.deepcopy(part)]

    def body(rank: int, group: dist.ProcessGroup) -> None:
        with pytest.raises(ModelError, match=r"'0\.weight' is computed from another tensor"):
            lockstep.parallelize(nn.Sequential(made[rank]), process_group=group)

    run_ranks(2, body)
