"""Sums of nodes where ranks reach each other's memory: on one host, or on each of several."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from lockstep.comm import (
    SharedBuffers,
    SharedMemoryGroup,
    any_rank,
    can_exchange_buffers,
    even_hosts,
    is_shared,
    named_barrier,
    start_all_to_all,
)
from lockstep.same_bits.chunks import Chunk
from lockstep.same_bits.sums import Node, add, cover, fold

# Of all nodes together, the elements that a rank sums at once: they stay in its caches.
_BLOCK_NUMEL = 256 * 1024
_CPU = torch.device("cpu")


class SumsInMemory:
    """Ranks of one host, each of which sums some elements of all nodes in place, for all ranks.

    Args:
        group: The ranks.
        nodes: For each rank, the nodes of which it has sums.
        root: The node that is wanted.
    """

    def __init__(
        self, group: SharedMemoryGroup, nodes: Sequence[Sequence[Node]], root: Node
    ) -> None:
        self._group, self._nodes, self._root = group, nodes, root
        self._host_group, self._rank, self._size = group, group.rank(), group.size()
        self._buffers: dict[torch.dtype, SharedBuffers] = {}

    def rows(self, chunk: Chunk, most_numel: int) -> torch.Tensor | None:
        """Return memory for this rank's nodes; None on all ranks if one of them has none."""
        if chunk.dtype not in self._buffers:
            numel = max(map(len, self._nodes)) * most_numel
            self._buffers[chunk.dtype] = SharedBuffers(self._host_group, numel, chunk.dtype, _CPU)
        return chunk.rows(self._buffers[chunk.dtype].next())

    def total(self, chunk: Chunk, divisor: float) -> torch.Tensor | None:
        """Return the sum, divided; None on all ranks if one of them lacks shared memory.

        Every rank must call it; it blocks.
        """
        buffers = self._buffers[chunk.dtype]
        buffers.start(buffers.local[0])
        buffers.wait()
        if not buffers.of_ranks:
            return None
        rows = [chunk.rows(each) for each in buffers.of_ranks]
        with torch.inference_mode():
            self._sum(chunk, rows, divisor)
        named_barrier(self._group, "sum of shards")
        buffers.note_read()
        return rows[self._rank][0]

    def _sum(self, chunk: Chunk, rows: Sequence[torch.Tensor], divisor: float) -> None:
        for part in self._blocks(chunk):
            total = fold(self._root, self._values(rows, part), add).div_(divisor)
            for its in rows:
                if its[0, part].data_ptr() != total.data_ptr():
                    its[0, part].copy_(total)

    def _blocks(self, chunk: Chunk) -> list[slice]:
        """The elements that this rank sums, in parts that stay in its caches."""
        each, size = chunk.numel // self._size, max(4096, _BLOCK_NUMEL // self._root[1])
        stop = (self._rank + 1) * each
        starts = range(self._rank * each, stop, size)
        return [slice(start, min(start + size, stop)) for start in starts]

    def _values(self, rows: Sequence[torch.Tensor], part: slice) -> dict[Node, torch.Tensor]:
        return {
            node: row[part]
            for nodes, its in zip(self._nodes, rows, strict=True)
            for node, row in zip(nodes, its, strict=False)
        }


class SumsOnHosts(SumsInMemory):
    """Ranks of several hosts: those of one add up the largest nodes that the host has.

    One is enough if the number of shards is that of ranks, or twice that, and a host's number of
    ranks is a power of two. Then each rank exchanges its elements with those of the same place on
    the other hosts, so that a host sends what a ring of hosts would.

    Args:
        group: The ranks.
        nodes: For each rank, the nodes of which it has sums.
        root: The node that is wanted.
        hosts: The ranks of each host.
    """

    def __init__(
        self,
        group: SharedMemoryGroup,
        nodes: Sequence[Sequence[Node]],
        root: Node,
        hosts: Sequence[Sequence[int]],
    ) -> None:
        host = next(its for its in hosts if group.rank() in its)
        super().__init__(group, [nodes[rank] for rank in host], root)
        self._host_group = group.of_this_host()
        self._rank, self._size = host.index(group.rank()), len(host)
        self._host, self._partners = hosts.index(host), [its[self._rank] for its in hosts]
        self._has_memory: dict[torch.dtype, bool] = {}
        firsts, lasts = ([nodes[its[at]][at] for its in hosts] for at in (0, -1))
        ranges = [range(first[0], last[1]) for first, last in zip(firsts, lasts, strict=True)]
        self._nodes_of_hosts = [cover(its, root) for its in ranges]

    def rows(self, chunk: Chunk, most_numel: int) -> torch.Tensor | None:
        """Return memory for this rank's nodes; None on all ranks if one of them has none."""
        rows = super().rows(chunk, most_numel)
        if chunk.dtype not in self._has_memory:
            lacks = not is_shared(self._buffers[chunk.dtype].local[0])
            self._has_memory[chunk.dtype] = not any_rank(self._group, [lacks])[0]
        return rows if self._has_memory[chunk.dtype] else None

    def _sum(self, chunk: Chunk, rows: Sequence[torch.Tensor], divisor: float) -> None:
        blocks, nodes = self._blocks(chunk), self._nodes_of_hosts[self._host]
        mine = slice(blocks[0].start, blocks[-1].stop)
        for part in blocks:
            for node in nodes:
                fold(node, self._values(rows, part), add)
        # The sum of a host's node is where the first of what it was added up of was.
        values = self._values(rows, mine)
        by_first = {first: value for (first, _), value in values.items()}
        piece = (mine.stop - mine.start) // len(self._partners)
        parts = torch.stack([by_first[first] for first, _ in nodes])
        parts = parts.view(len(nodes), -1, piece).transpose(0, 1).reshape(-1)
        counts = [*map(len, self._nodes_of_hosts)]
        received = self._exchanged(parts, [piece * count for count in counts])
        order = itertools.chain(*self._nodes_of_hosts)
        found: Mapping[Node, torch.Tensor] = dict(zip(order, received.view(-1, piece), strict=True))
        total = fold(self._root, found, add).div_(divisor)
        gathered = self._exchanged(total.repeat(len(self._partners)), [piece] * len(self._partners))
        for its in rows:
            its[0, mine].copy_(gathered)

    def _exchanged(self, sent: torch.Tensor, incoming: Sequence[int]) -> torch.Tensor:
        """Send equal parts to this rank's partners, and return what comes from each, in order."""
        received = torch.empty(sum(incoming), dtype=sent.dtype)
        sizes = dict(zip(self._partners, incoming, strict=True))
        out = dict.fromkeys(self._partners, sent.numel() // len(self._partners))
        ranks = range(self._group.size())
        each = [[by_rank.get(rank, 0) for rank in ranks] for by_rank in (sizes, out)]
        start_all_to_all(self._group, received, each[0], sent, each[1]).wait()
        return received


def in_memory(
    group: dist.ProcessGroup, nodes: Sequence[Sequence[Node]], root: Node
) -> SumsInMemory | None:
    """Return what sums nodes in memory that ranks share, if they do. All ranks must call it."""
    if not isinstance(group, SharedMemoryGroup):
        return None
    if can_exchange_buffers(group, _CPU):
        return SumsInMemory(group, nodes, root)
    hosts = even_hosts(group)
    follow = [*itertools.chain(*hosts)] == [*range(group.size())]
    return SumsOnHosts(group, nodes, root, hosts) if follow and len(hosts[0]) > 1 else None
