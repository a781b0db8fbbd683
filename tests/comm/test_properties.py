"""Collectives of tensors of any shape, strides and splits, against what one process computes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.comm.groups import OURS, assert_same_bits, reduced, run_on, values
from tests.counts import num_examples

# A slot holds 262,144 float32: pieces on both sides of what fits, and of a rank's part of it.
SLOT = 262_144
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64)

sizes = st.integers(1, 4)
dtypes = st.sampled_from(DTYPES)
lengths = st.one_of(
    st.integers(0, 20),
    st.integers(SLOT // 4 - 2, SLOT // 4 + 2),
    st.integers(SLOT - 2, SLOT + 2),
    st.integers(2 * SLOT - 2, 2 * SLOT + 70),
)
few = settings(
    max_examples=num_examples(40), deadline=None, suppress_health_check=list(HealthCheck)
)

over_ours = pytest.mark.parametrize("backend", OURS)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[int], list[int], int]:
    """A shape, the order of its dimensions in memory, and a step between elements."""
    shape = draw(st.lists(st.integers(0, 7), max_size=4))
    order = draw(st.permutations(range(len(shape))))
    return shape, list(order), draw(st.integers(1, 3))


def lay_out(tensor: torch.Tensor, order: list[int], step: int) -> torch.Tensor:
    memory = torch.zeros(tensor.numel() * step, dtype=tensor.dtype)[::step]
    inside = memory.view([tensor.shape[dim] for dim in order]) if order else memory.view(())
    placed = inside.permute([order.index(dim) for dim in range(len(order))])
    return placed.copy_(tensor)


@over_ours
@few
@given(size=sizes, dtype=dtypes, numel=lengths, where=st.sampled_from(["all", "some", "none"]))
def test_all_reduce_of_any_length(
    backend: str, size: int, dtype: torch.dtype, numel: int, where: str
) -> None:
    def body(group: dist.ProcessGroup) -> None:
        tensors = [values(dtype, [numel], seed=rank) for rank in range(size)]
        tensor = tensors[group.rank()]
        if where == "all" or (where == "some" and group.rank() % 2):
            tensor = group.empty(numel, dtype=dtype).copy_(tensor)
        group.allreduce(tensor).wait()
        assert_same_bits(tensor, reduced("SUM", [values(dtype, [numel], r) for r in range(size)]))

    run_on(backend, size, body)


@over_ours
@few
@given(size=sizes, dtype=dtypes, data=st.data())
def test_all_reduce_of_any_layout(
    backend: str, size: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    shape = data.draw(layouts())[0]
    orders = [data.draw(st.permutations(range(len(shape)))) for _ in range(size)]
    steps = [data.draw(st.integers(1, 3)) for _ in range(size)]

    def body(group: dist.ProcessGroup) -> None:
        rank = group.rank()
        tensor = lay_out(values(dtype, shape, rank), list(orders[rank]), steps[rank])
        group.allreduce(tensor).wait()
        assert_same_bits(tensor, reduced("SUM", [values(dtype, shape, r) for r in range(size)]))
        gathered = [torch.empty(shape, dtype=dtype) for _ in range(size)]
        mine = lay_out(values(dtype, shape, rank), list(orders[rank]), steps[rank])
        group.allgather(gathered, mine).wait()
        for r, other in enumerate(gathered):
            assert_same_bits(other, values(dtype, shape, r))

    run_on(backend, size, body)


@over_ours
@few
@given(size=sizes, dtype=dtypes, data=st.data())
def test_all_to_all_of_any_splits(
    backend: str, size: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    numbers = st.one_of(st.integers(0, 5), st.integers(SLOT // size - 2, SLOT // size + 70))
    splits = [[data.draw(numbers) for _ in range(size)] for _ in range(size)]

    def body(group: dist.ProcessGroup) -> None:
        rank = group.rank()
        mine = torch.cat([values(dtype, [n], rank * size + j) for j, n in enumerate(splits[rank])])
        theirs = [row[rank] for row in splits]
        output = torch.empty(sum(theirs), dtype=dtype)
        group.all_to_all_single(output, mine, theirs, splits[rank]).wait()
        expected = [values(dtype, [n], i * size + rank) for i, n in enumerate(theirs)]
        assert_same_bits(output, torch.cat(expected))

    run_on(backend, size, body)


@over_ours
@few
@given(size=sizes, dtype=dtypes, data=st.data())
def test_uneven_all_gather_and_reduce_scatter_undo_each_other(
    backend: str, size: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    numels = [data.draw(lengths) for _ in range(size)]

    def body(group: dist.ProcessGroup) -> None:
        rank = group.rank()
        outputs = [torch.empty(n, dtype=dtype) for n in numels]
        group.allgather(outputs, values(dtype, [numels[rank]], rank)).wait()
        for r, output in enumerate(outputs):
            assert_same_bits(output, values(dtype, [numels[r]], r))
        part = torch.empty(numels[rank], dtype=dtype)
        group.reduce_scatter(part, outputs).wait()
        assert_same_bits(part, reduced("SUM", [values(dtype, [numels[rank]], rank)] * size))

    run_on(backend, size, body)


@over_ours
@few
@given(size=sizes, dtype=dtypes, numel=lengths, data=st.data())
def test_broadcast_scatter_gather_and_reduce_of_any_length(
    backend: str, size: int, dtype: torch.dtype, numel: int, data: st.DataObject
) -> None:
    root = data.draw(st.integers(0, size - 1))

    def body(group: dist.ProcessGroup) -> None:
        rank = group.rank()
        everyone = [values(dtype, [numel], r) for r in range(size)]
        tensor = values(dtype, [numel], rank)
        group.broadcast(tensor, root).wait()
        assert_same_bits(tensor, everyone[root])
        output = torch.empty(numel, dtype=dtype)
        group.scatter(output, everyone if rank == root else [], root).wait()
        assert_same_bits(output, everyone[rank])
        outputs = [torch.empty(numel, dtype=dtype) for _ in range(size if rank == root else 0)]
        group.gather(outputs, output, root).wait()
        for got, expected in zip(outputs, everyone, strict=False):
            assert_same_bits(got, expected)
        group.reduce(output, root).wait()
        assert_same_bits(output, reduced("SUM", everyone) if rank == root else everyone[rank])

    run_on(backend, size, body)
