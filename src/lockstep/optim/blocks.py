"""Sharded parameters in one memory, in blocks: one for each rank, which owns its elements."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from lockstep.grad import aligned


class Blocks(NamedTuple):
    """Parameters in one memory, of which rank ``r`` owns block ``r``; all in elements."""

    offsets: tuple[int, ...]  # of each parameter
    size: int  # of a block


class Piece(NamedTuple):
    """The elements of a parameter that one rank owns."""

    parameter: int  # its index
    start: int  # its first element, of the parameter's
    stop: int


def in_order(groups: Sequence[Mapping[str, Any]]) -> dict[nn.Parameter, int]:
    """Return the index of the group of each parameter, in the order in which they are laid out.

    Within a group, it is the order in which gradients become ready.
    """
    number = {p: index for index, group in enumerate(groups) for p in group["params"]}
    parameters = [*reversed(number)]
    parameters.sort(key=number.__getitem__)
    return {parameter: number[parameter] for parameter in parameters}


def cut_evenly(numels: Sequence[int], num_ranks: int) -> Blocks:
    """Lay parameters side by side in their order, and cut the memory into equal blocks."""
    ends = [0, *itertools.accumulate(map(aligned, numels))]
    return Blocks(tuple(ends[:-1]), aligned(-(-ends[-1] // num_ranks)))


def keep_whole(numels: Sequence[int], num_ranks: int) -> Blocks:
    """Give each rank whole parameters, with about the same number of elements in total.

    From the largest parameter on, each is given to the rank with the fewest elements so far.

    Source: R. Graham, "Bounds on Multiprocessing Timing Anomalies" (1969): the largest block is
    less than 4/3 of the least possible.
    """
    owners, loads = [0] * len(numels), [0] * num_ranks
    for index in sorted(range(len(numels)), key=lambda index: -numels[index]):
        owners[index] = loads.index(min(loads))
        loads[owners[index]] += aligned(numels[index])
    block = max(loads)
    ends = [rank * block for rank in range(num_ranks)]
    offsets = []
    for owner, numel in zip(owners, numels, strict=True):
        offsets.append(ends[owner])
        ends[owner] += aligned(numel)
    return Blocks(tuple(offsets), block)


def owners_of(blocks: Blocks) -> list[int]:
    """Return for each parameter the rank that owns it, if parameters are kept whole."""
    return [offset // blocks.size for offset in blocks.offsets]


def pieces_of(blocks: Blocks, numels: Sequence[int], rank: int) -> list[Piece]:
    """Return the pieces of ``rank`` in the order of the memory, including empty parameters."""
    first, last = rank * blocks.size, (rank + 1) * blocks.size
    pieces = []
    for index, (offset, numel) in enumerate(zip(blocks.offsets, numels, strict=True)):
        start, stop = max(0, first - offset), min(numel, last - offset)
        if start < stop or (not numel and first <= offset < last):
            pieces.append(Piece(index, start, stop))
    return sorted(pieces, key=lambda piece: blocks.offsets[piece.parameter])
