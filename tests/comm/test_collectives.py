"""The collectives that move data and don't change it, on every backend."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from lockstep.errors import CollectiveMismatch
from tests.comm.groups import (
    BACKENDS,
    DTYPES,
    GLOO_DTYPES,
    OURS,
    SHAPES,
    all_gather_single,
    assert_same_bits,
    laid_out,
    over_backends_and_sizes,
    over_ours_and_sizes,
    reduce_scatter_single,
    run_on,
    values,
)
from tests.counts import pairs, some


def cases(backend: str, size: int) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    """A third of the dtypes with shapes, another one for each size."""
    return some(all_cases(backend), size)


def all_cases(backend: str) -> Iterator[tuple[torch.dtype, tuple[int, ...]]]:
    """Every dtype with every shape; the largest with two dtypes only."""
    for dtype in DTYPES if backend in OURS else GLOO_DTYPES:
        for shape in SHAPES:
            if sum(shape) < 100_000 or dtype in (torch.float32, torch.uint8):
                yield dtype, shape


def several(size: int, dtype: torch.dtype, shape: tuple[int, ...], first: int) -> list:
    return [values(dtype, shape, seed=first + i) for i in range(size)]


def assert_all_same(got: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for one, other in zip(got, expected, strict=True):
        assert_same_bits(one, other)


@pytest.mark.shortened
@over_backends_and_sizes
def test_broadcast_gives_everyone_what_the_root_has(backend: str, size: int) -> None:
    def body(group: dist.ProcessGroup) -> None:
        for dtype, shape in cases(backend, size):
            for root in {0, size - 1}:
                tensor = values(dtype, shape, seed=group.rank())
                dist.broadcast(tensor, group_src=root, group=group)
                assert_same_bits(tensor, values(dtype, shape, seed=root))

    run_on(backend, size, body)


@pytest.mark.shortened
@over_backends_and_sizes
def test_all_gather_gives_everyone_everything(backend: str, size: int) -> None:
    def body(group: dist.ProcessGroup) -> None:
        for dtype, shape in cases(backend, size):
            expected = several(size, dtype, shape, 0)
            tensor = expected[group.rank()]
            outputs = [torch.empty(shape, dtype=dtype) for _ in range(size)]
            dist.all_gather(outputs, tensor, group=group)
            assert_all_same(outputs, expected)
            single = torch.empty((size, *shape), dtype=dtype)
            all_gather_single(single, tensor[None], group=group)
            assert_all_same(list(single), expected)

    run_on(backend, size, body)


@over_ours_and_sizes
def test_all_gather_of_tensors_of_different_sizes(backend: str, size: int) -> None:
    def body(group: dist.ProcessGroup) -> None:
        for dtype in (torch.float32, torch.bool, torch.complex128, torch.float8_e5m2):
            for factor in (1, 150_000):
                shapes = [((3 * rank + 2) % 5 * factor, 2) for rank in range(size)]
                expected = [values(dtype, shape) for shape in shapes]
                outputs = [torch.empty(shape, dtype=dtype) for shape in shapes]
                dist.all_gather(outputs, expected[group.rank()], group=group)
                assert_all_same(outputs, expected)

    run_on(backend, size, body)


@pytest.mark.parametrize("backend", OURS)
def test_all_gather_into_tensors_of_a_wrong_size_is_refused_everywhere(backend: str) -> None:
    def body(group: dist.ProcessGroup) -> None:
        outputs = [torch.empty(2), torch.empty(3), torch.empty(4 + (group.rank() == 1))]
        with pytest.raises(CollectiveMismatch, match="rank 1"):
            dist.all_gather(outputs, torch.empty(2 + group.rank()), group=group)

    run_on(backend, 3, body)


@pytest.mark.shortened
@over_backends_and_sizes
def test_gather_gives_the_root_everything(backend: str, size: int) -> None:
    def body(group: dist.ProcessGroup) -> None:
        for dtype, shape in cases(backend, size):
            if backend == "gloo" and dtype.is_complex:
                continue  # torch makes pairs of real numbers of them elsewhere, but not here
            for root in {0, size - 1}:
                expected = several(size, dtype, shape, 0)
                outputs = None
                if group.rank() == root:
                    outputs = [torch.empty(shape, dtype=dtype) for _ in range(size)]
                dist.gather(expected[group.rank()], outputs, group_dst=root, group=group)
                if outputs is not None:
                    assert_all_same(outputs, expected)

    run_on(backend, size, body)


@pytest.mark.shortened
@over_backends_and_sizes
def test_scatter_gives_each_rank_its_own(backend: str, size: int) -> None:
    def body(group: dist.ProcessGroup) -> None:
        for dtype, shape in cases(backend, size):
            for root in {0, size - 1}:
                parts = several(size, dtype, shape, 0)
                output = torch.empty(shape, dtype=dtype)
                given = parts if group.rank() == root else None
                dist.scatter(output, given, group_src=root, group=group)
                assert_same_bits(output, parts[group.rank()])

    run_on(backend, size, body)


@pytest.mark.shortened
@over_backends_and_sizes
def test_all_to_all_gives_every_rank_its_part_of_each(backend: str, size: int) -> None:
    def body(group: dist.ProcessGroup) -> None:
        rank = group.rank()
        for dtype, shape in cases(backend, size):
            inputs = several(size, dtype, shape, rank * size)
            expected = [values(dtype, shape, seed=r * size + rank) for r in range(size)]
            if backend in OURS:  # torch has no lists of tensors over Gloo
                outputs = [torch.empty(shape, dtype=dtype) for _ in range(size)]
                dist.all_to_all(outputs, inputs, group=group)
                assert_all_same(outputs, expected)
            single = torch.empty((size, *shape), dtype=dtype)
            dist.all_to_all_single(single, torch.stack(inputs), group=group)
            assert_all_same(list(single), expected)

    run_on(backend, size, body)


@over_backends_and_sizes
def test_all_to_all_single_of_uneven_parts(backend: str, size: int) -> None:
    def body(group: dist.ProcessGroup) -> None:
        rank = group.rank()
        for dtype in (torch.float32, torch.bool, torch.int64, torch.complex64):
            for factor in (1, 100_000):
                # What rank i has for rank j; nothing, here and there.
                rows = [[(2 * i + 3 * j) % 4 * factor for j in range(size)] for i in range(size)]
                sent = [values(dtype, (rows[rank][j], 2), rank * size + j) for j in range(size)]
                splits = [theirs[rank] for theirs in rows]
                output = torch.empty((sum(splits), 2), dtype=dtype)
                dist.all_to_all_single(output, torch.cat(sent), splits, rows[rank], group=group)
                for i, part in enumerate(output.split(splits)):
                    assert_same_bits(part, values(dtype, (rows[i][rank], 2), i * size + rank))
                if backend in OURS:
                    outputs = [torch.empty(n, 2, dtype=dtype) for n in splits]
                    dist.all_to_all(outputs, sent, group=group)
                    assert_same_bits(torch.cat(outputs), output)

    run_on(backend, size, body)


@pytest.mark.parametrize("backend", OURS)
def test_all_to_all_with_sizes_that_do_not_agree_is_refused_everywhere(backend: str) -> None:
    def body(group: dist.ProcessGroup) -> None:
        splits = [1, 3] if group.rank() == 0 else [2, 2]
        with pytest.raises(CollectiveMismatch, match="rank 0"):
            dist.all_to_all_single(torch.empty(4), torch.empty(4), splits, [2, 2], group=group)

    run_on(backend, 2, body)


@over_backends_and_sizes
def test_nobody_leaves_a_barrier_before_the_last_has_come(backend: str, size: int) -> None:
    arrived: list[int] = []

    def body(group: dist.ProcessGroup) -> None:
        for number in range(1, 4):
            arrived.append(group.rank())
            dist.barrier(group=group)
            assert len(arrived) >= number * size
            arrived.append(group.rank())
            group.barrier(timeout=timedelta(seconds=20)).wait()
            group.monitored_barrier(timedelta(seconds=20))
            del arrived[:]
            group.monitored_barrier(wait_all_ranks=True)
            arrived.extend([-1] * (number * (group.rank() == 0) * size))
            group.barrier().wait()

    run_on(backend, size, body)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_tensor_given_twice_to_a_coalesced_all_reduce_is_reduced_once(backend: str) -> None:
    def body(group: dist.ProcessGroup) -> None:
        same = torch.full((3,), group.rank() + 1.0)
        group.allreduce_coalesced([same, same]).wait()
        assert same.tolist() == [3.0] * 3

        # On one rank alone they share memory, and in part.
        base = torch.full((4,), group.rank() + 1.0)
        halves = [base[:3], base[1:]] if group.rank() else [base[:3].clone(), base[1:].clone()]
        group.allreduce_coalesced(halves).wait()
        assert [half.tolist() for half in halves] == [[3.0] * 3] * 2

        # Side by side in one tensor they have no element in common.
        first, second = torch.full((4,), group.rank() + 1.0).split(2)
        group.allreduce_coalesced([first, second]).wait()
        assert first.tolist() + second.tolist() == [3.0] * 4

    run_on(backend, 2, body)


@over_backends_and_sizes
def test_coalesced_forms_do_as_their_parts(backend: str, size: int) -> None:
    shapes = ((3,), (2, 5), (300_001,))

    def body(group: dist.ProcessGroup) -> None:
        rank = group.rank()
        mine = [values(torch.float32, shape, rank) for shape in shapes]
        everyone = [[values(torch.float32, shape, r) for shape in shapes] for r in range(size)]
        sums = [sum(tensors) for tensors in zip(*everyone, strict=True)]

        tensors = [tensor.clone() for tensor in mine]
        group.allreduce_coalesced(tensors).wait()
        torch.testing.assert_close(tensors, sums)

        lists = [[torch.empty(shape) for shape in shapes] for _ in range(size)]
        group.allgather_coalesced(lists, mine).wait()
        for outputs, expected in zip(lists, everyone, strict=True):
            assert_all_same(outputs, expected)

        for is_async in (False, True):
            tensors = [tensor.clone() for tensor in mine]
            with dist.distributed_c10d._coalescing_manager(group, None, is_async) as manager:
                for tensor in tensors:
                    dist.all_reduce(tensor, group=group)
            if is_async:
                manager.wait()
            torch.testing.assert_close(tensors, sums)

            outputs = [torch.empty(size, *shape) for shape in shapes]
            with dist.distributed_c10d._coalescing_manager(group, None, is_async) as manager:
                for output, tensor in zip(outputs, mine, strict=True):
                    all_gather_single(output, tensor[None], group=group)
            if is_async:
                manager.wait()
            for i, output in enumerate(outputs):
                assert_all_same(list(output), [theirs[i] for theirs in everyone])

            outputs = [torch.empty(1, *shape) for shape in shapes]
            with dist.distributed_c10d._coalescing_manager(group, None, is_async) as manager:
                for output, tensor in zip(outputs, mine, strict=True):
                    whole = torch.stack([tensor] * size)
                    reduce_scatter_single(output, whole, group=group)
            if is_async:
                manager.wait()
            torch.testing.assert_close([output[0] for output in outputs], sums)

    run_on(backend, size, body)


@pairs(
    "backend, size, layout, shape",
    OURS,
    [1, 3],
    ["transposed", "strided", "channels_last", "conj", "needs gradients"],
    [(2, 3, 5, 4), (3, 50, 41, 45)],
)
def test_tensors_of_any_layout_go_and_come(
    backend: str, size: int, layout: str, shape: tuple[int, ...]
) -> None:
    dtype = torch.complex64 if layout == "conj" else torch.float32

    def body(group: dist.ProcessGroup) -> None:
        rank = group.rank()
        plain = several(size, dtype, shape, 0)
        mine = [laid_out(tensor, layout) for tensor in plain]

        def outputs() -> list[torch.Tensor]:
            return [laid_out(torch.zeros(shape, dtype=dtype), layout) for _ in range(size)]

        tensor = laid_out(plain[rank], layout)
        group.broadcast(tensor, size - 1).wait()
        assert_same_bits(tensor, plain[-1])

        got = outputs()
        group.allgather(got, mine[rank]).wait()
        assert_all_same(got, plain)

        got = outputs()
        group.gather(got if rank == 0 else [], mine[rank], 0).wait()
        if rank == 0:
            assert_all_same(got, plain)

        (output, *_) = outputs()
        group.scatter(output, mine if rank == 0 else [], 0).wait()
        assert_same_bits(output, plain[rank])

        got = outputs()
        group.alltoall(got, mine).wait()
        assert_all_same(got, [plain[rank]] * size)

        whole = torch.zeros((*shape, size), dtype=dtype).movedim(-1, 0)
        group.all_gather_single(whole, mine[rank]).wait()
        assert_all_same(list(whole), plain)
        group.all_to_all_single(whole, torch.stack(plain, dim=-1).movedim(-1, 0), [], []).wait()
        assert_all_same(list(whole), [plain[rank]] * size)

    run_on(backend, size, body)


@pytest.mark.parametrize("backend", OURS)
def test_what_is_wrong_on_this_rank_is_refused_before_anything_is_sent(backend: str) -> None:
    def body(group: dist.ProcessGroup) -> None:
        one, two = torch.zeros(2), torch.zeros(2, dtype=torch.int64)
        with pytest.raises(TypeError):
            group.allgather([one, two], one)
        with pytest.raises(TypeError):
            group.all_to_all_single(one, two, [], [])
        for refused in (
            lambda: group.broadcast(one, 2),
            lambda: group.broadcast(one, -1),
            lambda: group.reduce(one, 2),
            lambda: group.gather([], one, 2),
            lambda: group.scatter(one, [], 2),
            lambda: group.allgather([one], one),
            lambda: group.all_gather_single(one, one),
            lambda: group.gather([one, torch.zeros(3)], one, group.rank()),
            lambda: group.scatter(one, [one], group.rank()),
            lambda: group.reduce_scatter(one, [one]),
            lambda: group.reduce_scatter(one, [torch.zeros(3)] * 2),
            lambda: group.reduce_scatter_single(one, one),
            lambda: group.alltoall([one], [one]),
            lambda: group.all_to_all_single(one, one, [1, 2], []),
            lambda: group.all_to_all_single(one, torch.zeros(3), [], []),
            lambda: group.send([one], 2, 0),
            lambda: group.recv([one], -1, 0),
        ):
            with pytest.raises(ValueError):
                refused()
        total = torch.ones(1)
        dist.all_reduce(total, group=group)
        assert total.item() == 2

    run_on(backend, 2, body)
