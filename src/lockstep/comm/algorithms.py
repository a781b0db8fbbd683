"""The collectives, in terms of staging, meeting and reading what the others have staged.

Tensors here are flat and contiguous. Each function is called by every rank of the team with an
equal :class:`Call`, and returns when this rank's result is there and its input may be reused.
What doesn't fit into a slot goes in pieces. See Note [Two slots] in team.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from lockstep.comm.call import Call
from lockstep.comm.reduction import Reduction
from lockstep.comm.transport import Place, Transport
from lockstep.errors import CollectiveMismatch

# Up to here every rank sums everything itself: a second meeting would cost more than the sum.
_ONE_MEETING_BYTES = 64 * 1024


class Collectives:
    """The collectives among the ranks of a team.

    Args:
        team: The ranks.
        call: What they have called.
        timeout: How many seconds a rank waits for the others, each time that it does.
    """

    def __init__(self, team: Transport, call: Call, timeout: float) -> None:
        self._team = team
        self._call = call
        self._timeout = timeout

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self._team.meet(self._call, 0, self._timeout)

    def all_reduce(self, tensor: torch.Tensor, reduction: Reduction) -> None:
        """Combine all ranks' tensors, in rank order, and have the result in each."""
        if reduction.factor is not None:
            tensor.mul_(reduction.factor)
        if tensor.numel() * tensor.element_size() > _ONE_MEETING_BYTES:
            self._all_reduce_large(tensor, reduction)
        else:
            reduction.into(tensor, self._publish(tensor))

    def _all_reduce_large(self, tensor: torch.Tensor, reduction: Reduction) -> None:
        """Each rank combines its share of the elements, for all; a second meeting ends it."""
        team, dtype, numel = self._team, tensor.dtype, tensor.numel()
        here = team.find(tensor)
        piece = self._slot_numel(dtype)
        places = self._announce(tensor, here, slice(0, piece))
        if not any(map(team.is_staged, places)):
            share = self._share(numel, team.rank)
            mine = [whole[share] for whole in self._everyone(places, tensor)]
            reduction.into(mine[0], mine, mine[1:])
            self._meet()
            return
        for start in range(0, numel, piece):
            part = tensor[start : start + piece]
            if start:
                there = None if here is None else team.find(part)
                places = self._announce(tensor, there, slice(start, start + piece))
            self._all_reduce_piece(part, places, reduction)

    def _all_reduce_piece(
        self, part: torch.Tensor, places: Sequence[Place], reduction: Reduction
    ) -> None:
        team = self._team
        everyone = self._everyone(places, part)
        share = self._share(part.numel(), team.rank)
        mine = [whole[share] for whole in everyone]
        all_staged = all(map(team.is_staged, places))
        # Where all have staged, each takes the result from the first one's slot. A rank whose
        # tensor is itself in reach is free to change it once this call is over, so nobody may
        # still be reading there, and the result is written to everyone.
        reduction.into(mine[0], mine, () if all_staged else mine[1:])
        self._meet()
        if all_staged:
            part.copy_(everyone[0])
        elif team.is_staged(places[team.rank]):
            part.copy_(everyone[team.rank])

    def reduce(self, tensor: torch.Tensor, reduction: Reduction, root: int) -> None:
        """Combine all ranks' tensors, in rank order, and have the result on ``root``."""
        team = self._team
        source = tensor if reduction.factor is None else tensor.clone().mul_(reduction.factor)
        for piece in pieces(tensor.numel(), self._slot_numel(tensor.dtype)):
            everyone = self._publish(source[piece])
            share = self._share(everyone[0].numel(), team.rank)
            mine = [whole[share] for whole in everyone]
            reduction.into(mine[0], mine)
            self._meet()
            if team.rank == root:
                tensor[piece].copy_(everyone[0])

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Have what ``root`` has on every rank."""
        team = self._team
        for piece in pieces(tensor.numel(), self._slot_numel(tensor.dtype)):
            part = tensor[piece]
            place: Place = 0
            if team.rank == root:
                place, slot = team.stage(part.dtype, part.numel())
                slot.copy_(part)
            places = team.meet(self._call, place, self._timeout)
            if team.rank != root:
                part.copy_(team.at(root, places[root], part.dtype, part.numel()))

    def all_gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> None:
        """Have every rank's tensor, all of one size, on every rank."""
        for piece in pieces(tensor.numel(), self._slot_numel(tensor.dtype)):
            for output, part in zip(outputs, self._publish(tensor[piece]), strict=True):
                output[piece].copy_(part)

    def gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> None:
        """As :meth:`all_gather`, on the rank that gives ``outputs``; the others give none."""
        for piece in pieces(tensor.numel(), self._slot_numel(tensor.dtype)):
            parts = self._publish(tensor[piece])
            for output, part in zip(outputs, parts, strict=False):
                output[piece].copy_(part)

    def scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor], root: int) -> None:
        """Have on rank i the i-th of the tensors, all of one size, that ``root`` gives."""
        team = self._team
        for piece, numel in self._cells(output.numel(), output.dtype):
            place: Place = 0
            if team.rank == root:
                place, slot = team.stage(output.dtype, numel * team.size)
                torch.cat([part[piece] for part in inputs], out=slot)
            places = team.meet(self._call, place, self._timeout)
            everything = team.at(root, places[root], output.dtype, numel * team.size)
            output[piece].copy_(everything[team.rank * numel :][:numel])

    def reduce_scatter(
        self, output: torch.Tensor, inputs: Sequence[torch.Tensor], reduction: Reduction
    ) -> None:
        """Combine, on rank i, the i-th of each rank's tensors, which may differ in size."""
        team, sizes = self._team, [part.numel() for part in inputs]
        for piece, _ in self._cells(max(sizes), output.dtype):
            lengths = [_length_within(piece, size) for size in sizes]
            place, slot = team.stage(output.dtype, sum(lengths))
            torch.cat([part[piece] for part in inputs], out=slot)
            if reduction.factor is not None:
                slot.mul_(reduction.factor)
            places = team.meet(self._call, place, self._timeout)
            start = sum(lengths[: team.rank])
            cell = slice(start, start + lengths[team.rank])
            everyone = self._everyone(places, slot)
            reduction.into(output[piece], [whole[cell] for whole in everyone])

    def all_gather_uneven(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> None:
        """As :meth:`all_gather`, where the ranks' tensors differ in size.

        Raises:
            CollectiveMismatch: On every rank, if one expects another size of another.
        """
        sizes = check_gathered(self._call, self._agree([tensor.numel(), *map(len, outputs)]))
        for piece in pieces(max(sizes), self._slot_numel(tensor.dtype)):
            place, slot = self._team.stage(tensor.dtype, tensor[piece].numel())
            slot.copy_(tensor[piece])
            places = self._team.meet(self._call, place, self._timeout)
            for rank, output in enumerate(outputs):
                part = output[piece]
                part.copy_(self._team.at(rank, places[rank], part.dtype, part.numel()))

    def all_to_all(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        """Have the i-th rank's j-th input as the j-th rank's i-th output.

        Raises:
            CollectiveMismatch: On every rank, if one expects another size than it is sent.
        """
        team, dtype = self._team, inputs[0].dtype
        told = self._agree([*map(len, inputs), *map(len, outputs)])
        check_exchanged(self._call, told)
        largest = max(max(theirs[: team.size]) for theirs in told)
        for piece, _ in self._cells(largest, dtype):
            parts = [part[piece] for part in inputs]
            place, slot = team.stage(dtype, sum(part.numel() for part in parts))
            torch.cat(parts, out=slot)
            places = team.meet(self._call, place, self._timeout)
            for rank, (theirs, output) in enumerate(zip(told, outputs, strict=True)):
                # The slot of that rank holds, of each of its inputs, what falls into this piece.
                lengths = [_length_within(piece, size) for size in theirs[: team.size]]
                whole = team.at(rank, places[rank], dtype, sum(lengths))
                start = sum(lengths[: team.rank])
                output[piece].copy_(whole[start : start + lengths[team.rank]])

    def _agree(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return what every rank gives here; all give equally many numbers."""
        tables = self._publish(torch.tensor(numbers, dtype=torch.int64, device="cpu"))
        return [table.tolist() for table in tables]

    def _publish(self, part: torch.Tensor) -> list[torch.Tensor]:
        """Show the others ``part``, of one size on all ranks; return what each of them shows."""
        place, slot = self._team.stage(part.dtype, part.numel())
        slot.copy_(part)
        places = self._team.meet(self._call, place, self._timeout)
        return self._everyone(places, slot)

    def _everyone(self, places: Sequence[Place], own: torch.Tensor) -> list[torch.Tensor]:
        """What each rank has at its place, of the size and dtype of ``own``, which is here."""
        team = self._team
        return [
            own
            if rank == team.rank and not team.is_staged(place)
            else team.at(rank, place, own.dtype, own.numel())
            for rank, place in enumerate(places)
        ]

    def _announce(self, tensor: torch.Tensor, here: Place | None, piece: slice) -> Sequence[Place]:
        """Meet; what isn't in the others' reach is staged for it, a piece of it."""
        if here is None:
            part = tensor[piece]
            here, slot = self._team.stage(part.dtype, part.numel())
            slot.copy_(part)
        return self._team.meet(self._call, here, self._timeout)

    def _meet(self) -> None:
        self._team.meet(self._call, 0, self._timeout)

    def _slot_numel(self, dtype: torch.dtype) -> int:
        return self._team.slot_bytes // dtype.itemsize

    def _share(self, numel: int, rank: int) -> slice:
        """The part of ``numel`` elements that is ``rank``'s to combine, on cache line borders."""
        each = -(-numel // self._team.size)
        each += -each % 64
        return slice(min(rank * each, numel), min((rank + 1) * each, numel))

    def _cells(self, numel: int, dtype: torch.dtype) -> Iterator[tuple[slice, int]]:
        """Cut up ``numel`` elements so that a slot holds such a piece for each rank."""
        for piece in pieces(numel, self._slot_numel(dtype) // self._team.size):
            yield piece, piece.stop - piece.start


def check_gathered(call: Call, told: Sequence[Sequence[int]]) -> list[int]:
    """Return the sizes of what is gathered.

    Args:
        call: What was called.
        told: Of each rank, the size of what it gives, and those that it expects of all.

    Raises:
        CollectiveMismatch: If a rank expects other sizes.
    """
    sizes = [given for given, *_ in told]
    for rank, (_, *expected) in enumerate(told):
        _compare(call, rank, expected, sizes)
    return sizes


def check_exchanged(call: Call, told: Sequence[Sequence[int]]) -> None:
    """Raise CollectiveMismatch if a rank expects other sizes than it is sent.

    Args:
        call: What was called.
        told: Of each rank, the sizes of what it sends to all, and of what it expects of them.
    """
    for rank, theirs in enumerate(told):
        _compare(call, rank, theirs[len(told) :], [other[rank] for other in told])


def _compare(call: Call, rank: int, expected: Sequence[int], sent: Sequence[int]) -> None:
    if list(expected) != list(sent):
        raise CollectiveMismatch(
            f"In {call.operation}, rank {rank} expects {list(expected)} elements from ranks 0 to "
            f"{len(sent) - 1}, but {list(sent)} are sent to it. Make the sizes of outputs and "
            "inputs agree.",
            [rank],
            call.operation,
        )


def pieces(numel: int, size: int) -> Iterator[slice]:
    """Cut up ``numel`` elements; even if there are none there is one piece, and one meeting."""
    for start in range(0, max(numel, 1), size):
        yield slice(start, min(start + size, numel))


def _length_within(piece: slice, numel: int) -> int:
    """How many of ``numel`` elements are in ``piece`` of them."""
    return len(range(numel)[piece])
