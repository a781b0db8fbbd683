"""all_reduce, reduce and reduce_scatter, on every backend."""

from __future__ import annotations

import mmap
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from tests.comm.groups import (
    COMPLEX,
    DTYPES,
    FLOAT8,
    FLOATS,
    GLOO_DTYPES,
    INTS,
    OURS,
    SHAPES,
    assert_reduced,
    assert_same_bits,
    kept_values,
    laid_out,
    over_backends_and_sizes,
    over_ours_and_sizes,
    reduce_scatter_single,
    reduced,
    run_on,
    values,
)
from tests.counts import pairs, some

OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
_BITWISE = ("BAND", "BOR", "BXOR")
_ORDERED = ("MIN", "MAX")


def supports(backend: str, op: str, dtype: torch.dtype) -> bool:
    """Whether the backend reduces such tensors: ours as torch's operators do, Gloo less."""
    if op in _BITWISE:
        possible = not (dtype.is_floating_point or dtype.is_complex)
    elif op in _ORDERED:
        possible = not dtype.is_complex
    elif op == "AVG":
        possible = dtype != torch.bool
    else:
        possible = True
    if backend in OURS:
        return possible
    # Gloo has no average, adds bools as bytes, and torch lets complex numbers only be summed.
    return (
        possible
        and op != "AVG"
        and dtype in GLOO_DTYPES
        and dtype != torch.bool
        and (op == "SUM" or not dtype.is_complex)
    )


def cases(backend: str, size: int, op: str) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    """A third of the dtypes that work with shapes, another one for each size and operator."""
    return some(all_cases(backend, op), size + OPS.index(op))


def all_cases(backend: str, op: str) -> Iterator[tuple[torch.dtype, tuple[int, ...]]]:
    """Every dtype that works, with every shape; the largest with a few dtypes only."""
    for dtype in DTYPES:
        for shape in SHAPES:
            is_large = sum(shape) > 100_000
            if supports(backend, op, dtype) and (
                not is_large or dtype in (torch.float32, torch.bfloat16, torch.int64)
            ):
                yield dtype, shape


@pytest.mark.shortened
@over_backends_and_sizes
@pytest.mark.parametrize("op", OPS)
def test_all_reduce_combines_all_ranks_values(backend: str, size: int, op: str) -> None:
    if backend == "gloo" and op == "AVG":
        pytest.skip("Gloo has no average")

    def body(group: dist.ProcessGroup) -> None:
        for dtype, shape in cases(backend, size, op):
            tensors = [kept_values(dtype, shape, rank) for rank in range(size)]
            tensor = tensors[group.rank()].clone()
            if dtype.is_complex and op == "PRODUCT":  # dist.all_reduce refuses it for all
                group.allreduce(tensor, getattr(dist.ReduceOp, op)).wait()
            else:
                dist.all_reduce(tensor, getattr(dist.ReduceOp, op), group=group)
            assert_reduced(backend, tensor, op, tensors)

    run_on(backend, size, body)


@pytest.mark.shortened
@over_backends_and_sizes
@pytest.mark.parametrize("op", ["SUM", "MAX", "BXOR"])
def test_reduce_gives_the_root_the_result_and_nobody_else(backend: str, size: int, op: str) -> None:
    def body(group: dist.ProcessGroup) -> None:
        for dtype, shape in cases(backend, size, op):
            for root in {0, size - 1}:
                tensors = [kept_values(dtype, shape, rank) for rank in range(size)]
                tensor = tensors[group.rank()].clone()
                dist.reduce(tensor, group_dst=root, op=getattr(dist.ReduceOp, op), group=group)
                if group.rank() == root:
                    assert_reduced(backend, tensor, op, tensors)
                elif backend in OURS:  # Gloo leaves there what it came to
                    assert_same_bits(tensor, tensors[group.rank()])

    run_on(backend, size, body)


@pytest.mark.parametrize("backend", OURS)
def test_reduce_of_products_leaves_the_values_of_others(backend: str) -> None:
    def body(group: dist.ProcessGroup) -> None:
        tensor = torch.ones(3)
        op = dist._make_nccl_premul_sum(2.0)
        dist.reduce(tensor, group_dst=0, op=op, group=group)
        assert tensor.tolist() == [1 if group.rank() else 4] * 3

    run_on(backend, 2, body)


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
@pytest.mark.parametrize("backend", OURS)
def test_reduce_takes_memory_that_cannot_be_written_to(backend: str) -> None:
    memory = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ)

    def body(group: dist.ProcessGroup) -> None:
        tensor = torch.ones(4, 3).t()
        if group.rank():
            tensor = torch.frombuffer(memory, dtype=torch.float32, count=12).view(4, 3).t()
        dist.reduce(tensor, group_dst=0, group=group)
        assert tensor.unique().tolist() == [0 if group.rank() else 1]

    run_on(backend, 2, body)


@pytest.mark.shortened
@over_backends_and_sizes
@pytest.mark.parametrize("op", ["SUM", "AVG", "MIN", "BOR"])
def test_reduce_scatter_gives_each_rank_its_part(backend: str, size: int, op: str) -> None:
    if backend == "gloo" and op == "AVG":
        pytest.skip("Gloo has no average")

    def body(group: dist.ProcessGroup) -> None:
        rank = group.rank()
        for dtype, shape in cases(backend, size, op):
            if backend == "gloo" and (not sum(shape) or (op != "SUM" and sum(shape) > 100_000)):
                continue  # takes neither empty tensors nor such without dimensions
            given = [kept_values(dtype, shape, rank * size + part) for part in range(size)]
            combined = [kept_values(dtype, shape, r * size + rank) for r in range(size)]
            output = torch.empty(shape, dtype=dtype)
            kind = getattr(dist.ReduceOp, op)
            dist.reduce_scatter(output, [part.clone() for part in given], kind, group=group)
            assert_reduced(backend, output, op, combined)
            single = torch.empty(shape, dtype=dtype)
            whole = torch.cat(given) if shape else torch.stack(given)
            reduce_scatter_single(single, whole, kind, group=group)
            assert_reduced(backend, single, op, combined)

    run_on(backend, size, body)


@over_ours_and_sizes
def test_reduce_scatter_of_uneven_parts(backend: str, size: int) -> None:
    sizes = [(3 * rank + 1) % 7 * 30_000 for rank in range(size)]

    def body(group: dist.ProcessGroup) -> None:
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.complex64):
            parts = [[values(dtype, [n], seed=r) for n in sizes] for r in range(size)]
            output = torch.empty(sizes[group.rank()], dtype=dtype)
            dist.reduce_scatter(output, parts[group.rank()], group=group)
            assert_same_bits(output, reduced("SUM", [theirs[group.rank()] for theirs in parts]))

    run_on(backend, size, body)


@over_ours_and_sizes
@pytest.mark.parametrize("factor", [0.3, -2.0])
def test_premul_sum_multiplies_each_ranks_values_first(
    backend: str, size: int, factor: float
) -> None:
    op = dist._make_nccl_premul_sum(factor)

    def body(group: dist.ProcessGroup) -> None:
        for dtype in (*FLOATS, *COMPLEX):
            for shape in ((), (0,), (5,), (70_001,)):
                tensors = [values(dtype, shape, seed=rank) for rank in range(size)]
                products = [tensor * factor for tensor in tensors]
                tensor = tensors[group.rank()].clone()
                dist.all_reduce(tensor, op, group=group)
                assert_same_bits(tensor, reduced("SUM", products))
                tensor = tensors[group.rank()].clone()
                dist.reduce(tensor, group_dst=0, op=op, group=group)
                if group.rank() == 0:
                    assert_same_bits(tensor, reduced("SUM", products))
                parts = [tensors[group.rank()].clone() for _ in range(size)]
                output = torch.empty(shape, dtype=dtype)
                dist.reduce_scatter(output, parts, op, group=group)
                assert_same_bits(output, reduced("SUM", products))

    run_on(backend, size, body)


def test_premul_sum_takes_a_tensor_as_its_factor() -> None:
    op = dist._make_nccl_premul_sum(torch.tensor([0.5]))

    def body(group: dist.ProcessGroup) -> None:
        tensor = torch.full((3,), 2.0)
        dist.all_reduce(tensor, op, group=group)
        assert tensor.tolist() == [2.0] * 3

    run_on("shm", 2, body)


@pytest.mark.parametrize("backend", OURS)
@pytest.mark.parametrize(
    ("op", "dtypes"),
    [
        ("BAND", (*FLOATS, *COMPLEX, *FLOAT8)),
        ("BXOR", (torch.float32, torch.float8_e5m2)),
        ("MIN", COMPLEX),
        ("MAX", COMPLEX),
        ("AVG", (torch.bool,)),
        ("PREMUL_SUM", (*INTS, torch.bool, *FLOAT8)),
    ],
)
def test_what_torch_cannot_combine_is_refused_before_anything_is_sent(
    backend: str, op: str, dtypes: tuple[torch.dtype, ...]
) -> None:
    kind = getattr(dist.ReduceOp, op) if op != "PREMUL_SUM" else dist._make_nccl_premul_sum(2.0)

    def body(group: dist.ProcessGroup) -> None:
        for dtype in dtypes:
            tensor = torch.ones(3, dtype=dtype)
            for is_async in (False, True):
                opts = dist.AllreduceOptions()
                opts.reduceOp, opts.asyncOp = kind, is_async
                with pytest.raises(TypeError):
                    group.allreduce([tensor], opts)
            with pytest.raises(TypeError):
                group.reduce(tensor, 0, kind)
            with pytest.raises(TypeError):
                group.reduce_scatter(tensor, [tensor] * group.size(), kind)
        total = torch.ones(1)
        dist.all_reduce(total, group=group)
        assert total.item() == group.size()

    run_on(backend, 2, body)


@pairs(
    "backend, size, layout, shape",
    OURS,
    [1, 3],
    ["transposed", "strided", "channels_last", "conj", "offset", "needs gradients"],
    [(2, 3, 5, 4), (3, 50, 41, 45)],
)
def test_reductions_of_tensors_of_any_layout(
    backend: str, size: int, layout: str, shape: tuple[int, ...]
) -> None:
    dtype = torch.complex64 if layout == "conj" else torch.float32

    def body(group: dist.ProcessGroup) -> None:
        rank = group.rank()
        plain = [values(dtype, shape, seed=r) for r in range(size)]
        expected = reduced("SUM", plain)
        # Ranks needn't agree on the layout.
        tensor = laid_out(plain[rank], layout) if rank != 1 else plain[1].clone()
        strides, version = tensor.stride(), tensor._version
        group.allreduce([tensor]).wait()
        assert_same_bits(tensor, expected)
        assert (tensor.stride(), tensor._version) == (strides, version)

        tensor = laid_out(plain[rank], layout)
        group.reduce(tensor, size - 1).wait()
        assert_same_bits(tensor, expected if rank == size - 1 else plain[rank])

        output = laid_out(torch.zeros(shape, dtype=dtype), layout)
        group.reduce_scatter(output, [laid_out(plain[rank], layout)] * size).wait()
        assert_same_bits(output, expected)

        single = laid_out(torch.zeros(shape, dtype=dtype), layout)
        whole = torch.stack([plain[rank]] * size, dim=-1).movedim(-1, 0)
        group.reduce_scatter_single(single, whole).wait()
        assert_same_bits(single, expected)

    run_on(backend, size, body)


@pairs(
    "backend, size, who, op",
    OURS,
    [1, 2, 3, 4],
    ["all", "only some", "a part of it"],
    ["SUM", "AVG"],
)
def test_all_reduce_of_tensors_born_in_shared_memory(
    backend: str, size: int, who: str, op: str
) -> None:
    def body(group: dist.ProcessGroup) -> None:
        rank = group.rank()
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint8):
            for numel in (0, 5, 70_000, 600_003):
                tensors = [values(dtype, [numel], seed=r) for r in range(size)]
                if who == "only some" and rank % 2:
                    tensor = torch.empty(numel, dtype=dtype)
                elif who == "a part of it":
                    tensor = group.empty(numel + 7, dtype=dtype)[7 - rank : numel + 7 - rank]
                else:
                    tensor = group.empty((numel,), dtype=dtype)
                for _ in range(2):
                    tensor.copy_(tensors[rank])
                    dist.all_reduce(tensor, getattr(dist.ReduceOp, op), group=group)
                    assert_same_bits(tensor, reduced(op, tensors))

    run_on(backend, size, body)


@over_ours_and_sizes
def test_sums_are_the_same_in_every_run_and_on_every_rank(backend: str, size: int) -> None:
    def body(group: dist.ProcessGroup) -> list[bytes]:
        found = []
        for numel in (11, 9_000, 70_000, 500_000):
            for dtype in (torch.float32, torch.float16):
                # Numbers of very different size: any other order of summing shows.
                tensor = values(dtype, [numel], seed=group.rank())
                tensor *= 10.0 ** (group.rank() * 2 - 3)
                for _ in range(3):
                    shared = group.empty(numel, dtype=dtype)
                    for each in (shared, tensor.clone()):
                        each.copy_(tensor)
                        dist.all_reduce(each, group=group)
                        found.append(each.numpy().tobytes())
        return found

    runs = [run_on(backend, size, body) for _ in range(2)]
    first = runs[0][0]
    assert all(bits == first for run in runs for bits in run)
    assert all(first[i] == first[i - i % 6] for i in range(len(first)))


def _sparse(rank: int, size: int) -> torch.Tensor:
    count = (rank * 5) % 7  # none, on rank 0
    generator = torch.Generator().manual_seed(rank)
    indices = torch.randint(0, 4, (2, count), generator=generator)
    return torch.sparse_coo_tensor(
        indices, torch.randn(count, 3, generator=generator), (4, 5, 3), check_invariants=True
    )


@over_backends_and_sizes
def test_all_reduce_of_sparse_tensors_sums_what_is_there(backend: str, size: int) -> None:
    def body(group: dist.ProcessGroup) -> None:
        dense = [_sparse(rank, size).to_dense() for rank in range(size)]
        tensor = _sparse(group.rank(), size)
        group.allreduce([tensor]).wait()
        assert tensor.is_sparse
        torch.testing.assert_close(tensor.to_dense(), reduced("SUM", dense))
        if backend in OURS:
            tensor = _sparse(group.rank(), size)
            group.allreduce([tensor], dist.ReduceOp.AVG).wait()
            torch.testing.assert_close(tensor.to_dense(), reduced("AVG", dense))
            with pytest.raises(TypeError, match="COO"):
                group.allreduce([_sparse(group.rank(), size)], dist.ReduceOp.MAX)

    run_on(backend, size, body)
