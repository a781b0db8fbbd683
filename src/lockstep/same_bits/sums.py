"""Sums of gradients over a step's shards in the order of a tree, whatever the number of ranks.

A node ``(first, stop)`` is the sum over the shards from ``first`` to ``stop - 1``. Its left child
has the largest power of two of them that is less than all.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist

from lockstep.comm import (
    SharedBuffers,
    SharedMemoryGroup,
    all_gather_in_place,
    all_to_all,
    can_exchange_buffers,
    named_barrier,
)
from lockstep.grad import aligned, gradient_dtype, view_like
from lockstep.torch_private import _foreach_add_, _foreach_copy_

Node = tuple[int, int]
T = TypeVar("T")


def split(node: Node) -> int:
    """Return where the right child of ``node`` begins, which has two shards at least."""
    first, stop = node
    return first + (1 << ((stop - first - 1).bit_length() - 1))


def shards_of(rank: int, num_ranks: int, num_shards: int) -> range:
    """Return the shards that ``rank`` computes, which follow each other."""
    return range(rank * num_shards // num_ranks, (rank + 1) * num_shards // num_ranks)


def cover(shards: range, root: Node) -> list[Node]:
    """Return the largest nodes of the tree below ``root`` that lie in ``shards``, in their order.

    Their sums are what a rank gives to the others: one if the number of shards is the number of
    ranks, or twice that.
    """
    first, stop = root
    if shards.start <= first and stop <= shards.stop:
        return [root]
    if stop <= shards.start or shards.stop <= first:
        return []
    middle = split(root)
    return [*cover(shards, (first, middle)), *cover(shards, (middle, stop))]


def fold(root: Node, values: Mapping[Node, T], add: Callable[[T, T], T]) -> T:
    """Return the value of ``root`` from ``values`` of nodes that cover it."""
    if root in values:
        return values[root]
    first, stop = root
    middle = split(root)
    left = fold((first, middle), values, add)
    return add(left, fold((middle, stop), values, add))


def inner_nodes(root: Node) -> set[Node]:
    """Return ``root`` and all nodes below it that aren't single shards."""
    first, stop = root
    if stop - first < 2:
        return set()
    middle = split(root)
    return {root} | inner_nodes((first, middle)) | inner_nodes((middle, stop))


# Gradients by parameter; None for one without.
Gradients = list[torch.Tensor | None]

# The most bytes of gradients that ranks sum at once, if no single one is larger: Gloo's all-gather
# of 64 MiB takes longer than four of 16.
_CAP_BYTES = 16 * 1024 * 1024
# Of all nodes together, the elements that a rank sums at once: they stay in its caches.
_BLOCK_NUMEL = 256 * 1024
# Adding it changes no number, and 0.0 would make 0.0 of -0.0. Shown by
# test_a_parameter_without_gradient_in_some_shards_keeps_the_sign_of_zero.
_NOTHING = -0.0


def add(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Add ``right`` to ``left``, in place, and return it."""
    return left.add_(right)


class LocalSums:
    """Adds up the gradients of a rank's shards as they come, siblings of the tree at once.

    It needs as many additions as plain accumulation has, and memory for a set of gradients for each
    node that waits for its sibling: one more than accumulation if a rank has two shards.

    Args:
        num_shards: The number of all shards.
        shards: Those of this rank.
    """

    def __init__(self, num_shards: int, shards: range) -> None:
        root = (0, num_shards)
        self._inner = {
            (first, stop)
            for first, stop in inner_nodes(root)
            if shards.start <= first and stop <= shards.stop
        }
        self._stack: list[tuple[Node, Gradients]] = []

    def add(self, shard: int, gradients: Gradients) -> None:
        """Add the ``gradients`` of the next shard, which may be changed."""
        self._stack.append(((shard, shard + 1), gradients))
        while len(self._stack) > 1:
            ((first, _), left), ((_, stop), right) = self._stack[-2:]
            if (first, stop) not in self._inner:
                return
            self._stack[-2:] = [((first, stop), _sum(left, right))]

    def nodes(self) -> dict[Node, Gradients]:
        """Return the sums of the largest nodes, after the last shard."""
        return dict(self._stack)


def _sum(left: Gradients, right: Gradients) -> Gradients:
    pairs = [(a, b) for a, b in zip(left, right, strict=True) if a is not None and b is not None]
    if pairs:
        _foreach_add_([a for a, _ in pairs], [b for _, b in pairs])
    return [b if a is None else a for a, b in zip(left, right, strict=True)]


class _Chunk(NamedTuple):
    """Gradients that ranks sum at once, of one dtype: which, and where each begins."""

    dtype: torch.dtype
    indices: list[int]
    offsets: list[int]
    numel: int  # a multiple of what each rank sums


def _rows(memory: torch.Tensor, chunk: _Chunk) -> torch.Tensor:
    """Return ``memory`` as rows, each for one sum."""
    count = len(memory) // chunk.numel
    return memory[: count * chunk.numel].view(count, chunk.numel)


class SumOverRanks:
    """Sums over all shards, of the gradients of some parameters, on each of the ranks of a group.

    Where ranks reach each other's memory, each sums some elements of all nodes in place, and writes
    them to all. Else each gets some elements of all nodes from all ranks, and sends them the sum,
    which are the bytes of a ring if a rank has one node.

    Args:
        group: The ranks.
        num_shards: The number of shards.
        parameters: The parameters.
    """

    def __init__(
        self, group: dist.ProcessGroup, num_shards: int, parameters: Sequence[torch.Tensor]
    ) -> None:
        self._group, self._root = group, (0, num_shards)
        self._parameters = parameters
        self._size, self._rank = group.size(), group.rank()
        ranks = range(self._size)
        self._nodes = [cover(shards_of(rank, self._size, num_shards), self._root) for rank in ranks]
        self._most_nodes = max(map(len, self._nodes))
        self._chunks = [*self._in_chunks()]
        self._shared: dict[torch.dtype, SharedBuffers] = {}
        self._scratch: dict[torch.dtype, torch.Tensor] = {}

    def _in_chunks(self) -> Iterator[_Chunk]:
        dtypes = [gradient_dtype(parameter) for parameter in self._parameters]
        for dtype in dict.fromkeys(dtypes):
            cap = _CAP_BYTES // dtype.itemsize
            indices: list[int] = []
            offsets = [0]
            for index in (index for index, each in enumerate(dtypes) if each == dtype):
                size = aligned(self._parameters[index].numel())
                if indices and offsets[-1] + size > cap:
                    yield self._chunk(dtype, indices, offsets)
                    indices, offsets = [], [0]
                indices.append(index)
                offsets.append(offsets[-1] + size)
            yield self._chunk(dtype, indices, offsets)

    def _chunk(self, dtype: torch.dtype, indices: list[int], offsets: list[int]) -> _Chunk:
        numel = self._size * aligned(-(-offsets[-1] // self._size))
        return _Chunk(dtype, indices, offsets[:-1], numel)

    def __call__(
        self, nodes: Mapping[Node, Gradients], used: Sequence[bool], divisor: float
    ) -> Gradients:
        """Return the sums of all shards, divided by ``divisor``. Every rank must call it.

        Args:
            nodes: This rank's sums, by node; their memory may be used for the result.
            used: Whether any rank has a gradient, by parameter; the others stay without.
            divisor: What to divide by.
        """
        mine = [nodes[node] for node in self._nodes[self._rank]]
        result: Gradients = [None] * len(self._parameters)
        for chunk in self._chunks:
            if not any(used[index] for index in chunk.indices):
                continue
            buffers = self._shared_buffers(chunk)
            rows = self._rows(chunk, len(mine)) if buffers is None else _rows(buffers.next(), chunk)
            self._fill(rows, chunk, mine)
            total = None if buffers is None else self._sum_in_place(buffers, chunk, divisor)
            if total is None:
                total = self._sum_of_parts(rows[: len(mine)], chunk, divisor)
            self._take(total, chunk, mine[0], used, result)
        return result

    def _most(self, dtype: torch.dtype) -> int:
        """The most elements of a chunk of ``dtype``."""
        return max(each.numel for each in self._chunks if each.dtype == dtype)

    def _rows(self, chunk: _Chunk, count: int) -> torch.Tensor:
        """Return memory for ``count`` sums, which is used anew in each step."""
        if chunk.dtype not in self._scratch:
            self._scratch[chunk.dtype] = torch.empty(
                count * self._most(chunk.dtype), dtype=chunk.dtype
            )
        return _rows(self._scratch[chunk.dtype], chunk)[:count]

    def _fill(self, rows: torch.Tensor, chunk: _Chunk, mine: Sequence[Gradients]) -> None:
        for row, gradients in zip(rows, mine, strict=False):
            views, sources = [], []
            for index, offset in zip(chunk.indices, chunk.offsets, strict=True):
                view = view_like(row, offset, self._parameters[index])
                if (gradient := gradients[index]) is None:
                    view.fill_(_NOTHING)
                else:
                    views.append(view)
                    sources.append(gradient)
            if views:
                _foreach_copy_(views, sources)

    def _take(
        self,
        total: torch.Tensor,
        chunk: _Chunk,
        mine: Gradients,
        used: Sequence[bool],
        result: Gradients,
    ) -> None:
        """Copy gradients out of ``total``, to memory that has them or to their own."""
        targets: list[torch.Tensor] = []
        views = []
        for index, offset in zip(chunk.indices, chunk.offsets, strict=True):
            if not used[index]:
                continue
            views.append(view_like(total, offset, self._parameters[index]))
            target = mine[index]
            if target is None or target.stride() != views[-1].stride():
                target = torch.empty_strided(views[-1].shape, views[-1].stride(), dtype=total.dtype)
            targets.append(target)
            result[index] = target
        _foreach_copy_(targets, views)

    # Where ranks reach each other's memory.

    def _shared_buffers(self, chunk: _Chunk) -> SharedBuffers | None:
        if not isinstance(self._group, SharedMemoryGroup):
            return None
        if not can_exchange_buffers(self._group, torch.device("cpu")):
            return None  # these are ranks of several hosts
        if chunk.dtype not in self._shared:
            numel = self._most_nodes * self._most(chunk.dtype)
            self._shared[chunk.dtype] = SharedBuffers(
                self._group, numel, chunk.dtype, torch.device("cpu")
            )
        return self._shared[chunk.dtype]

    def _sum_in_place(
        self, buffers: SharedBuffers, chunk: _Chunk, divisor: float
    ) -> torch.Tensor | None:
        """Return the sum; None on all ranks if one of them lacks shared memory."""
        buffers.start(buffers.local[0])
        buffers.wait()
        if not buffers.of_ranks:
            return None
        rows, numel = [_rows(each, chunk) for each in buffers.of_ranks], chunk.numel
        each = numel // self._size
        block = max(4096, _BLOCK_NUMEL // self._root[1])
        with torch.inference_mode():
            for start in range(self._rank * each, (self._rank + 1) * each, block):
                stop = min(start + block, (self._rank + 1) * each)
                values = {
                    node: row[start:stop]
                    for nodes, its in zip(self._nodes, rows, strict=True)
                    for node, row in zip(nodes, its, strict=False)
                }
                total = fold(self._root, values, add).div_(divisor)
                for its in rows:
                    if its[0, start:stop].data_ptr() != total.data_ptr():
                        its[0, start:stop].copy_(total)
        named_barrier(self._group, "sum of shards")
        buffers.note_read()
        return rows[self._rank][0]

    # Over any group.

    def _sum_of_parts(self, rows: torch.Tensor, chunk: _Chunk, divisor: float) -> torch.Tensor:
        each = chunk.numel // self._size
        counts = [*map(len, self._nodes)]
        sent = rows.view(len(rows), self._size, each).transpose(0, 1).reshape(-1)
        received = torch.empty(each * sum(counts), dtype=rows.dtype)
        incoming = [each * count for count in counts]
        all_to_all(self._group, received, incoming, sent, [each * len(rows)] * self._size)
        order = itertools.chain(*self._nodes)
        values = dict(zip(order, received.view(-1, each), strict=True))
        total = fold(self._root, values, add).div_(divisor)
        gathered = rows[0]
        gathered.view(self._size, each)[self._rank].copy_(total)
        all_gather_in_place(self._group, gathered)
        return gathered
