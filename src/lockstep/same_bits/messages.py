"""Sums of nodes by messages: each rank sums some elements for all, over a group of any kind."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from lockstep.comm import Started, carrier, start_all_gather_in_place, start_all_to_all
from lockstep.same_bits.chunks import Chunk
from lockstep.same_bits.sums import Node, add, fold


class Sent(NamedTuple):
    """Elements of all nodes that are on their way to the ranks that sum them.

    Attributes:
        rows: This rank's nodes, of which the first gets the sum.
        parts: What is sent of them, which lasts as long.
        received: What comes from all ranks, of the elements that this one sums.
        work: The exchange.
    """

    rows: torch.Tensor
    parts: torch.Tensor
    received: torch.Tensor
    work: Started


class Messages:
    """Ranks that send each other some elements of all nodes, and then their sums.

    These are the bytes of a ring if a rank has one node. It doesn't hold the group.

    Args:
        group: The ranks.
        nodes: For each rank, the nodes of which it has sums.
        root: The node that is wanted.
    """

    def __init__(
        self, group: dist.ProcessGroup, nodes: Sequence[Sequence[Node]], root: Node
    ) -> None:
        self._weak_group, self._root = weakref.ref(group), root
        self._rank, self._size = group.rank(), group.size()
        self._order, self._counts = [*itertools.chain(*nodes)], [*map(len, nodes)]
        self._scratch: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}

    @property
    def _group(self) -> dist.ProcessGroup:
        group = self._weak_group()
        assert group is not None  # callers hold it
        return group

    def rows(self, chunk: Chunk, most_numel: int) -> torch.Tensor:
        """Return memory for this rank's nodes, used anew for each chunk of a dtype and device."""
        count, kind = self._counts[self._rank], (chunk.dtype, chunk.device)
        if kind not in self._scratch:
            self._scratch[kind] = _empty(count * most_numel, chunk)
        return chunk.rows(self._scratch[kind])[:count]

    def new_rows(self, chunk: Chunk) -> torch.Tensor:
        """Return memory for this rank's nodes, for ``chunk`` alone."""
        count = self._counts[self._rank]
        return chunk.rows(_empty(count * chunk.numel, chunk))

    def start(self, rows: torch.Tensor) -> Sent:
        """Start sending what ``rows`` has. Every rank must call it; it returns at once."""
        each = rows.shape[1] // self._size
        parts = rows.view(len(rows), self._size, each).transpose(0, 1).reshape(-1)
        if rows.device.type != "cpu" and carrier(self._group, rows.device) == "gloo":
            parts = parts.cpu()  # Gloo has no all-to-all of a device's memory
        received = parts.new_empty(each * len(self._order))
        incoming = [each * count for count in self._counts]
        outgoing = [each * len(rows)] * self._size
        work = start_all_to_all(self._group, received, incoming, parts, outgoing)
        return Sent(rows, parts, received, work)

    def start_gather(self, sent: Sent, divisor: float) -> Callable[[], None]:
        """Sum this rank's elements, and start gathering all in the first of ``sent.rows``.

        The return value waits until they are there, on a GPU its stream does.

        Every rank must call it; it waits until elements of all ranks have come.
        """
        sent.work.wait()
        each = sent.rows.shape[1] // self._size
        values = dict(zip(self._order, sent.received.view(-1, each), strict=True))
        total = fold(self._root, values, add).div_(divisor)
        whole = sent.rows[0]
        gathered = whole if total.device == whole.device else total.new_empty(whole.shape)
        gathered.view(self._size, each)[self._rank].copy_(total)
        work = start_all_gather_in_place(self._group, gathered)

        def wait() -> None:
            work.wait()
            if gathered is not whole:
                whole.copy_(gathered)

        return wait

    def total(self, rows: torch.Tensor, divisor: float) -> torch.Tensor:
        """Return the sum, divided. Every rank must call it; it blocks."""
        self.start_gather(self.start(rows), divisor)()
        return rows[0]


def _empty(numel: int, chunk: Chunk) -> torch.Tensor:
    return torch.empty(numel, dtype=chunk.dtype, device=chunk.device)
