"""Every form in which torch's groups take a call, on every backend."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)

from tests.comm.groups import BACKENDS, OURS, run_on

SOON = timedelta(seconds=20)
SUM = dist.ReduceOp.SUM
MAX = dist.ReduceOp.MAX

# Each takes a group of two, its rank's tensor [rank + 1] and somewhere to put two of them, and
# gives what the result is in: the sum (3), or both tensors.
Form = Callable[[dist.ProcessGroup, torch.Tensor, list[torch.Tensor]], dist.Work]


def _with(options: object, **values: object) -> object:
    for name, value in values.items():
        setattr(options, name, value)
    return options


SUMS: dict[str, Form] = {
    "allreduce(list)": lambda g, t, _: g.allreduce([t]),
    "allreduce(list, opts)": lambda g, t, _: g.allreduce([t], AllreduceOptions()),
    "allreduce(opts=)": lambda g, t, _: g.allreduce([t], opts=AllreduceOptions()),
    "allreduce(list, op)": lambda g, t, _: g.allreduce([t], SUM),
    "allreduce(list, op, timeout)": lambda g, t, _: g.allreduce([t], SUM, SOON),
    "allreduce(tensor)": lambda g, t, _: g.allreduce(t),
    "allreduce(tensor, op)": lambda g, t, _: g.allreduce(t, SUM),
    "allreduce(tensor, op=)": lambda g, t, _: g.allreduce(t, op=SUM),
    "allreduce(tensor, timeout=)": lambda g, t, _: g.allreduce(t, timeout=SOON),
    "allreduce(tensor=)": lambda g, t, _: g.allreduce(tensor=t, op=SUM, timeout=None),
    "allreduce(tensors=)": lambda g, t, _: g.allreduce(tensors=[t], op=SUM, timeout=SOON),
    "allreduce_coalesced": lambda g, t, _: g.allreduce_coalesced([t], AllreduceCoalescedOptions()),
    "reduce_scatter(lists)": lambda g, t, _: g.reduce_scatter([t], [[t.clone(), t.clone()]]),
    "reduce_scatter(lists, opts)": lambda g, t, _: g.reduce_scatter(
        [t], [[t.clone(), t.clone()]], ReduceScatterOptions()
    ),
    "reduce_scatter(tensor, list)": lambda g, t, _: g.reduce_scatter(t, [t.clone(), t.clone()]),
    "reduce_scatter(op, timeout)": lambda g, t, _: g.reduce_scatter(
        t, [t.clone(), t.clone()], SUM, SOON
    ),
    "reduce_scatter(names)": lambda g, t, _: g.reduce_scatter(
        output=t, input=[t.clone(), t.clone()], op=SUM, timeout=SOON
    ),
    "reduce_scatter_single": lambda g, t, _: g.reduce_scatter_single(t, t.repeat(2)),
    "reduce_scatter_single(names)": lambda g, t, _: g.reduce_scatter_single(
        outputTensor=t, inputTensor=t.repeat(2), opts=ReduceScatterOptions()
    ),
    "_reduce_scatter_base": lambda g, t, _: g._reduce_scatter_base(t, t.repeat(2)),
    "reduce_scatter_single_coalesced": lambda g, t, _: g.reduce_scatter_single_coalesced(
        [t], [t.repeat(2)]
    ),
    "reduce_scatter_tensor_coalesced": lambda g, t, _: g.reduce_scatter_tensor_coalesced(
        outputs=[t], inputs=[t.repeat(2)], opts=ReduceScatterOptions()
    ),
}

SUMS_ON_ROOT: dict[str, Form] = {
    "reduce(list, opts)": lambda g, t, _: g.reduce([t], _with(ReduceOptions(), rootRank=1)),
    "reduce(tensor, root)": lambda g, t, _: g.reduce(t, 1),
    "reduce(tensor, root, op)": lambda g, t, _: g.reduce(t, 1, SUM),
    "reduce(names)": lambda g, t, _: g.reduce(tensor=t, root=1, op=SUM, timeout=SOON),
}

BROADCASTS: dict[str, Form] = {
    "broadcast(list, opts)": lambda g, t, _: g.broadcast(
        [t], _with(BroadcastOptions(), rootRank=1)
    ),
    "broadcast(tensor, root)": lambda g, t, _: g.broadcast(t, 1),
    "broadcast(tensor, root, timeout)": lambda g, t, _: g.broadcast(t, 1, SOON),
    "broadcast(names)": lambda g, t, _: g.broadcast(tensor=t, root=1, timeout=SOON),
}


def _row(tensors: list[torch.Tensor]) -> torch.Tensor:
    """One tensor in whose memory both are."""
    return tensors[0]._base if tensors[0]._base is not None else tensors[0]


GATHERS: dict[str, Form] = {
    "allgather(lists)": lambda g, t, o: g.allgather([o], [t]),
    "allgather(lists, opts)": lambda g, t, o: g.allgather([o], [t], AllgatherOptions()),
    "allgather(list, tensor)": lambda g, t, o: g.allgather(o, t),
    "allgather(list, tensor, timeout)": lambda g, t, o: g.allgather(o, t, SOON),
    "allgather(names)": lambda g, t, o: g.allgather(output_tensors=o, input_tensor=t, timeout=SOON),
    "allgather_coalesced": lambda g, t, o: g.allgather_coalesced([[o[0]], [o[1]]], [t]),
    "all_gather_single": lambda g, t, o: g.all_gather_single(_row(o), t),
    "all_gather_single(names)": lambda g, t, o: g.all_gather_single(
        output=_row(o), input=t, opts=AllgatherOptions()
    ),
    "_allgather_base": lambda g, t, o: g._allgather_base(_row(o), t, AllgatherOptions()),
    "all_gather_single_coalesced": lambda g, t, o: g.all_gather_single_coalesced([_row(o)], [t]),
    "allgather_into_tensor_coalesced": lambda g, t, o: g.allgather_into_tensor_coalesced(
        [_row(o)], [t]
    ),
    "all_to_all_single": lambda g, t, o: g.all_to_all_single(_row(o), t.repeat(2), [], []),
    "all_to_all_single(opts)": lambda g, t, o: g.all_to_all_single(
        _row(o), t.repeat(2), [1, 1], [1, 1], AllToAllOptions()
    ),
    "alltoall_base(timeout)": lambda g, t, o: g.alltoall_base(
        _row(o), t.repeat(2), [1, 1], [1, 1], timeout=SOON
    ),
}

GATHERS_ON_ROOT: dict[str, Form] = {
    "gather(lists, opts)": lambda g, t, o: g.gather(
        [o] if g.rank() == 1 else [], [t], _with(GatherOptions(), rootRank=1)
    ),
    "gather(list, tensor, root)": lambda g, t, o: g.gather(o if g.rank() == 1 else [], t, 1),
    "gather(names)": lambda g, t, o: g.gather(
        output_tensors=o if g.rank() == 1 else [], input_tensor=t, root=1, timeout=SOON
    ),
}

SCATTERS: dict[str, Form] = {
    "scatter(lists, opts)": lambda g, t, o: g.scatter(
        [t], [o] if g.rank() == 1 else [], _with(ScatterOptions(), rootRank=1)
    ),
    "scatter(tensor, list, root)": lambda g, t, o: g.scatter(t, o if g.rank() == 1 else [], 1),
    "scatter(names)": lambda g, t, o: g.scatter(
        output_tensor=t, input_tensors=o if g.rank() == 1 else [], root=1, timeout=SOON
    ),
}

BARRIERS: dict[str, Form] = {
    "barrier()": lambda g, t, _: g.barrier(),
    "barrier(opts)": lambda g, t, _: g.barrier(BarrierOptions()),
    "barrier(opts=)": lambda g, t, _: g.barrier(opts=BarrierOptions()),
    "barrier(timeout)": lambda g, t, _: g.barrier(SOON),
    "barrier(timeout=)": lambda g, t, _: g.barrier(timeout=SOON),
}


def _check(group: dist.ProcessGroup, forms: dict[str, Form], kind: str) -> None:
    rank = group.rank()
    for name, form in forms.items():
        tensor, outputs = torch.tensor([rank + 1.0]), list(torch.zeros(2).split(1))
        if kind == "scatters":
            outputs = [torch.tensor([10.0]), torch.tensor([20.0])]
        form(group, tensor, outputs).wait()
        got = [part.item() for part in (tensor, *outputs)]
        on_root = rank == 1
        expected = {
            "sums": [3, 0, 0],
            "sums on root": [3, 0, 0] if on_root else got,
            "broadcasts": [2, 0, 0],
            "gathers": [rank + 1, 1, 2],
            "gathers on root": [2, 1, 2] if on_root else [1, 0, 0],
            "scatters": [10 * (rank + 1), 10, 20],
            "barriers": [rank + 1, 0, 0],
        }[kind]
        assert got == expected, name


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("kind", "forms"),
    [
        ("sums", SUMS),
        ("sums on root", SUMS_ON_ROOT),
        ("broadcasts", BROADCASTS),
        ("gathers", GATHERS),
        ("gathers on root", GATHERS_ON_ROOT),
        ("scatters", SCATTERS),
        ("barriers", BARRIERS),
    ],
)
def test_every_form_of_a_call(backend: str, kind: str, forms: dict[str, Form]) -> None:
    if backend not in OURS:  # torch's own groups have got some of these names with 2.13
        forms = {k: f for k, f in forms.items() if hasattr(dist.ProcessGroup, k.split("(")[0])}
        assert forms
    run_on(backend, 2, lambda group: _check(group, forms, kind))


@pytest.mark.parametrize("backend", OURS)
def test_what_is_no_form_of_a_call_is_refused(backend: str) -> None:
    def body(group: dist.ProcessGroup) -> None:
        tensor = torch.ones(1)
        for refused in (
            lambda: group.allreduce(),
            lambda: group.allreduce(tensor, SUM, SOON, 3),
            lambda: group.allreduce(tensor, root=3),
            lambda: group.allreduce(tensor, AllreduceOptions(), root=3),
            lambda: group.allgather([tensor]),
            lambda: group.barrier(1, 2),
            lambda: group.broadcast(tensor, "first"),
        ):
            with pytest.raises(TypeError):
                refused()

    run_on(backend, 1, body)


@pytest.mark.parametrize("backend", OURS)
def test_an_operator_is_taken_from_any_form(backend: str) -> None:
    def body(group: dist.ProcessGroup) -> None:
        for form in (
            lambda tensor: group.allreduce(tensor, MAX),
            lambda tensor: group.allreduce([tensor], dist.ReduceOp(MAX)),
            lambda tensor: group.allreduce(tensor, _with(AllreduceOptions(), reduceOp=MAX)),
        ):
            tensor = torch.tensor([group.rank() + 1.0])
            form(tensor).wait()
            assert tensor.item() == 2

    run_on(backend, 2, body)


@pytest.mark.parametrize("backend", OURS)
def test_empty_takes_what_torch_takes(backend: str) -> None:
    def body(group: dist.ProcessGroup) -> None:
        for made, shape, dtype in (
            (group.empty(2, 3), (2, 3), torch.float32),
            (group.empty((2, 3), torch.float64), (2, 3), torch.float64),
            (group.empty([4], dtype=torch.int8, device="cpu"), (4,), torch.int8),
            (group.empty(()), (), torch.float32),
            (group.empty(0, torch.bfloat16), (0,), torch.bfloat16),
        ):
            assert (made.shape, made.dtype, made.device.type) == (shape, dtype, "cpu")
        with pytest.raises(RuntimeError, match="negative dimension"):
            group.empty(-1)
        with pytest.raises(TypeError):
            group.empty()
        with pytest.raises(ValueError, match="leave out the device"):
            group.empty(3, device="meta")

    run_on(backend, 2, body)


@pytest.mark.parametrize("backend", OURS)
def test_expanded_tensors_are_summed(backend: str) -> None:
    def body(group: dist.ProcessGroup) -> list[float]:
        tensor = torch.ones(1, 2).expand(3, 2)
        group.allreduce([tensor]).wait()
        return tensor.tolist()

    assert run_on(backend, 2, body) == [[[2.0, 2.0]] * 3] * 2


@pytest.mark.parametrize("backend", OURS)
def test_a_factor_of_another_dtype_leaves_the_tensors(backend: str) -> None:
    # As large as goes in several pieces: they are counted in elements of the tensor's dtype.
    def body(group: dist.ProcessGroup) -> list[float]:
        tensor = torch.ones(600_001)
        factor = torch.full((1,), 0.5, dtype=torch.float64)
        group.reduce([tensor], 0, dist._make_nccl_premul_sum(factor)).wait()
        return tensor.unique().tolist()

    assert run_on(backend, 2, body) == [[1.0], [1.0]]


@pytest.mark.parametrize("backend", OURS)
def test_calls_do_not_heed_the_default_device(backend: str) -> None:
    narrow, sizes = torch.ones(5, dtype=torch.bfloat16), [1, 2]

    def body(group: dist.ProcessGroup) -> list[float]:
        mine = narrow.clone()
        output = torch.empty(2 * (1 + group.rank()), device="cpu")
        given = torch.ones(3, device="cpu")
        with torch.device("meta"):
            group.allreduce([mine]).wait()
            group.alltoall_base(output, given, [1 + group.rank()] * 2, sizes).wait()
        return [*mine.tolist(), *output.tolist()]

    assert run_on(backend, 2, body) == [[2.0] * 5 + [1.0] * 2, [2.0] * 5 + [1.0] * 4]
