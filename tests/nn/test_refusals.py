"""What parallelize() and DistributedDataParallel refuse, and in which words."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lockstep
from lockstep import errors
from tests.nn.parallel import BOTH, in_place, net, parts, wrapped
from tests.ranks import Backend, run_ranks


@BOTH
@pytest.mark.parametrize(
    ("theirs", "says"),
    [
        (
            nn.Linear(60, 320),
            r"'weight' is .*\(320, 60\).* on rank 1 and .*\(320, 50\).* on rank 0",
        ),
        (nn.Linear(50, 320).double(), r"float64 on rank 1 and .*float32 on rank 0"),
        (nn.Linear(50, 320, bias=False), "'bias' is not there on rank 1"),
        (nn.Bilinear(50, 2, 320), r"'weight' is .*\(320, 50, 2\)"),
    ],
)
def test_another_model_on_one_rank_is_named_on_every_rank(parallel, theirs, says: str) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = copy.deepcopy(theirs) if rank == 1 else nn.Linear(50, 320)
        with pytest.raises(errors.ModelMismatch, match=says):
            parallel(model, group)

    run_ranks(3, body)


def test_a_part_frozen_on_one_rank_only_is_named() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = net()
        model.second.weight.requires_grad_(rank == 0)
        with pytest.raises(errors.ModelMismatch, match=r"'second.weight' is a frozen parameter"):
            lockstep.parallelize(model, process_group=group)

    run_ranks(2, body)


@BOTH
def test_nothing_to_train_is_refused(parallel) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        for model in (nn.ReLU(), nn.Linear(2, 2).requires_grad_(False)):
            with pytest.raises(errors.NothingToTrain, match="no parameter that requires"):
                parallel(model, group)

    run_ranks(2, body)


def test_lazy_parameters_are_refused_by_name() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        with pytest.raises(errors.ModelError, match=r"'0\.weight' has no shape yet"):
            in_place(nn.Sequential(nn.LazyLinear(3)), group)

    run_ranks(1, body)


@BOTH
def test_making_parallel_what_is_parallel_is_refused(parallel) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = parallel(net(), group)
        theirs = nn.parallel.DistributedDataParallel(net(), process_group=group)
        for again in (wrapped, in_place):
            with pytest.raises(errors.AlreadyParallel, match="is parallel already, through torch"):
                again(theirs, group)
        with pytest.raises(errors.AlreadyParallel, match="is parallel already"):
            in_place(model, group)

    run_ranks(2, body)


@BOTH
def test_torchs_wrapper_around_a_parallel_model_is_refused(parallel) -> None:
    """Both would reduce in the memory of the gradients, which then are divided twice."""

    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = parallel(net(), group)
        for outer in (model, nn.Sequential(model, nn.Linear(2, 2))):
            with pytest.raises(errors.AlreadyParallel, match="replace_torch_ddp"):
                nn.parallel.DistributedDataParallel(outer, process_group=group)

    run_ranks(2, body)


def test_torchs_wrapper_may_leave_out_what_is_parallel() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        outer = nn.Sequential(lockstep.parallelize(nn.Linear(3, 3), process_group=group), net())
        names = [name for name, _ in outer[0].named_parameters(prefix="0")]
        wrapper = nn.parallel.DistributedDataParallel
        wrapper._set_params_and_buffers_to_ignore_for_model(outer, names)
        wrapper(outer, process_group=group)

    run_ranks(2, body)


def test_a_refused_model_can_be_mended_and_tried_again() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = nn.Linear(2, 2).requires_grad_(False)
        with pytest.raises(errors.NothingToTrain):
            in_place(model, group)
        in_place(model.requires_grad_(True), group)

    run_ranks(2, body)


@BOTH
@pytest.mark.parametrize("shape", [(2, 6), (1, 6)], ids=["smaller", "would broadcast"])
def test_a_parameter_that_changed_shape_is_named(parallel, shape: tuple[int, ...]) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = parallel(net(), group)
        for _ in range(2):  # with the second, buckets have their final arrangement
            model(parts(2)[rank]).sum().backward()
        model.zero_grad()
        model.second.weight.data = torch.ones(shape, dtype=torch.float64)
        model.second.bias.data = torch.ones(shape[:1], dtype=torch.float64)
        with pytest.raises(
            errors.ParameterChanged, match=r"'second.(weight|bias)' is .*, but was \(3,"
        ):
            model(parts(2)[rank]).sum().backward()

    run_ranks(2, body)


@pytest.mark.parametrize("cap", [0, -1, float("nan"), float("inf"), "25"])
@BOTH
def test_a_bucket_that_holds_nothing_is_refused(parallel, cap: float) -> None:
    with pytest.raises(ValueError, match="bucket_cap_mb"):
        parallel(net(), None, bucket_cap_mb=cap)


def test_two_devices_for_one_rank_are_refused() -> None:
    with pytest.raises(ValueError, match="device_ids names 2 devices"):
        wrapped(net(), None, device_ids=[0, 1])


def test_no_sync_of_a_plain_model_is_refused() -> None:
    with pytest.raises(errors.ModelError, match="isn't parallel"):
        lockstep.no_sync(net())


def test_one_rank_that_must_refuse_ends_the_wait_of_the_others() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> str:
        model = net().requires_grad_(rank != 1)
        with pytest.raises(errors.ModelError) as caught:
            in_place(model, group)
        return str(caught.value)

    first, second, third = run_ranks(3, body)
    assert second.startswith("Net has no parameter that requires a gradient")
    assert first == third
    assert first.startswith("Rank 1 can't go on, so no rank can: Net has no parameter")


@pytest.mark.parametrize(
    ("name", "values"), [("bucket_cap_mb", [25, 1]), ("broadcast_buffers", [True, False])]
)
def test_options_that_differ_are_named(name: str, values: list) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        with pytest.raises(errors.ModelMismatch, match=f"'{name}' is {values[1]} on rank 1"):
            in_place(net(), group, **{name: values[rank]})

    run_ranks(2, body)


def test_a_buffer_that_differs_is_named() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = net()
        model.register_buffer("seen", torch.zeros(2 + rank))
        with pytest.raises(errors.ModelMismatch, match=r"'seen' is a buffer \(3,\)"):
            in_place(model, group)

    run_ranks(2, body)


def test_another_memory_order_is_named() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = nn.Conv2d(3, 4, 3)
        if rank == 1:
            model = model.to(memory_format=torch.channels_last)
        with pytest.raises(errors.ModelMismatch, match=r"'weight' is .* with strides .* on rank 1"):
            in_place(model, group)

    run_ranks(2, body)


@BOTH
def test_a_shared_parameter_is_reduced_by_one_model_alone(parallel) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        encoder = nn.Linear(4, 4)
        first, second = nn.Sequential(encoder, nn.Linear(4, 2)), nn.Sequential(encoder)
        keep = parallel(first, group)
        with pytest.raises(errors.AlreadyParallel, match=r"'0\.weight' is parallel already"):
            parallel(second, group)
        with pytest.raises(errors.AlreadyParallel, match="'weight' is parallel already"):
            parallel(encoder, group)
        del keep

    run_ranks(2, body)


def test_a_wrapper_that_is_gone_leaves_its_model_free() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model, x = net(), parts(2)[rank]
        parallel = wrapped(model, group)
        parallel(x).sum().backward()
        del parallel
        gc.collect()
        again = wrapped(model, group)
        again.zero_grad()
        again(x).sum().backward()
        others = [torch.empty_like(model.first.weight.grad) for _ in range(2)]
        group.allgather([others], [model.first.weight.grad]).wait()
        assert torch.equal(*others)

    run_ranks(2, body)


@pytest.mark.parametrize(
    ("backend", "said"),
    [
        ("threads", r"Rank 1 has left the group(.|\n)*all-reduce of the gradients of '"),
        ("gloo", r"Rank 1 is gone(.|\n)*all-reduce of the gradients of '"),
    ],
)
def test_a_rank_that_is_gone_is_an_error_that_names_the_gradients(
    backend: Backend, said: str
) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = in_place(net(), group)
        if rank == 0:
            with pytest.raises(errors.CollectiveFailed, match=said):
                model(parts(2)[0]).sum().backward()

    run_ranks(2, body, group_timeout_seconds=4, backend=backend)


@pytest.mark.parametrize("parallel", [wrapped, in_place, lambda m, _: lockstep.no_sync(m)])
def test_what_is_no_module_is_refused(parallel) -> None:
    with pytest.raises(
        (TypeError, errors.ModelError), match=r"not a torch\.nn\.Module|isn't parallel"
    ):
        parallel("model", None)


@pytest.mark.parametrize(
    "options",
    [
        {"device_ids": [0]},
        {"device_ids": ["cuda:1"]},
        {"device_ids": [torch.device("meta")]},
        {"output_device": 0},
        {"output_device": "cuda"},
    ],
    ids=str,
)
def test_a_device_where_the_model_isnt_is_refused_at_once(options: dict[str, object]) -> None:
    (name,) = options
    with pytest.raises(ValueError, match=rf"{name} names .*, but the model is on cpu"):
        wrapped(net(), None, **options)


def test_the_models_own_device_may_be_named() -> None:
    model = wrapped(net(), None, device_ids=["cpu"], output_device=torch.device("cpu"))
    assert model.device_ids == [torch.device("cpu")]


@BOTH
def test_errors_of_models_are_runtime_errors_as_torchs_are(parallel) -> None:
    """Code that is written for torch catches them."""

    def body(rank: int, group: dist.ProcessGroup) -> None:
        for model in (
            nn.Linear(2, 2 + rank),
            nn.ReLU(),
            nn.Sequential(nn.LazyLinear(3)),
        ):
            with pytest.raises(RuntimeError):
                parallel(model, group)

    run_ranks(2, body)


def test_a_second_parallelize_says_how_to_go_on() -> None:
    model = lockstep.parallelize(net())
    with pytest.raises(errors.AlreadyParallel, match="Go on with it as it is"):
        lockstep.parallelize(model)


def test_arguments_of_the_wrapper_are_told_apart_from_wrong_ones() -> None:
    with pytest.raises(TypeError, match=r"no find_unused_parameters, static_graph.* leave them"):
        lockstep.parallelize(net(), find_unused_parameters=True, static_graph=True)
    with pytest.raises(TypeError, match=r"got bucket_cap, and takes module, .*bucket_cap_mb, "):
        lockstep.parallelize(net(), bucket_cap=1)


@pytest.mark.parametrize("made", [nn.Linear(2, 2), nn.BatchNorm1d(2)], ids=["bare", "buffers"])
def test_a_backward_of_one_rank_alone_is_told_what_to_do(made: nn.Module) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = wrapped(copy.deepcopy(made), group)
        x = torch.randn(4, 2)
        if rank == 0:
            with pytest.raises(errors.CollectiveFailed) as caught:
                model.module(x).square().sum().backward()
            assert "one that is of this rank alone runs in 'with lockstep.no_sync" in "".join(
                caught.value.__notes__
            )
        else:
            with pytest.raises(errors.CollectiveFailed):
                group.barrier().wait()

    run_ranks(2, body)


@BOTH
def test_a_device_whose_tensors_the_group_does_not_carry_is_named_on_every_rank(
    parallel, monkeypatch: pytest.MonkeyPatch
) -> None:
    carries = {"cpu": [False, True]}

    def carrier(group: dist.ProcessGroup, device: torch.device) -> str | None:
        return "threads" if carries[device.type][group.rank()] else None

    monkeypatch.setattr("lockstep.nn.verify.carrier", carrier)

    def body(rank: int, group: dist.ProcessGroup) -> None:
        refusal = r"'weight' is on cpu, and the backends of the process group carry no tensors of"
        kind = errors.ModelMismatch if rank else errors.ModelError
        with pytest.raises(kind, match=rf"{'Rank 0 .*' if rank else ''}{refusal} cpu.*Move"):
            parallel(nn.Linear(2, 2), group)
        carries["cpu"] = [True, True]
        parallel(nn.Linear(2, 2), group)

    run_ranks(2, body)
