"""Shards: elements of parameters that one rank updates at once, and their optimizer state."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterator, MutableMapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch

from lockstep.grad import DeferredBucket, source_of
from lockstep.optim.flat import FlatParameters, elements_of
from lockstep.optim.layout import Piece

# The most elements of a shard: with gradient and state they stay in a core's own cache from one
# operation of the optimizer to the next.
_NUMEL = 64 * 1024
# How many are summed at once, if they are so large.
_NUM_SUMMED = 16
# State that torch's element-wise optimizers have once for each parameter, and not by element.
_SCALARS = {"step", "mu_product", "eta", "mu"}


class Shard:
    """Elements of a flat memory that follow each other, which the optimizer updates as one tensor.

    Their parameters are in one group of the optimizer, and have always had gradients in the same
    steps: so they have the same step count, and whatever else isn't there for each element.

    Attributes:
        flat: The memory.
        pieces: The elements, by parameter.
        group: The index of the optimizer's parameter group.
        tensor: The elements; of one dimension unless the memory keeps parameters whole.
    """

    def __init__(self, flat: FlatParameters, pieces: Sequence[Piece], group: int) -> None:
        self.flat, self.pieces, self.group = flat, list(pieces), group
        self.tensor = flat.own_part(pieces)
        self._gradient: torch.Tensor | None = None

    def take_from(self, bucket: DeferredBucket) -> None:
        """Make the mean of the elements of ``bucket`` that are where its own are its gradient."""
        start = self.flat.offset_of(self.pieces[0])
        self.tensor.grad = bucket.new_sum(start, start + self.tensor.numel())

    def take_gradient(self) -> None:
        """Make the gradients of its parameters, all of which have one, that of its tensor."""
        parameters = [self.flat.parameters[piece.parameter] for piece in self.pieces]
        if self.flat.keeps_whole:
            self.tensor.grad = parameters[0].grad
            return
        if len(self.pieces) == 1 and source_of(parameters[0]) is None:
            _, start, stop = self.pieces[0]
            self.tensor.grad = _elements(parameters[0])[start:stop]
            return
        if self._gradient is None:
            self._gradient = torch.zeros_like(self.tensor)
        own = self.tensor.grad = self._gradient
        for piece, parameter in zip(self.pieces, parameters, strict=True):
            part, source = own[self.place_of(piece)], source_of(parameter)
            if source is not None:
                source.bucket.sum_into(part, source.start + piece.start)
            else:
                part.copy_(_elements(parameter)[piece.start : piece.stop])

    def place_of(self, piece: Piece) -> slice:
        """Return where the elements of ``piece`` are in its tensor, if that has one dimension."""
        start = self.flat.offset_of(piece) - self.flat.offset_of(self.pieces[0])
        return slice(start, start + piece.stop - piece.start)

    def split(self, key: Callable[[int], Hashable], state: MutableMapping[Any, Any]) -> list[Shard]:
        """Divide it where ``key`` of neighbouring parameters differs, and its part of ``state``."""
        parts = [list(part) for _, part in groupby(self.pieces, lambda piece: key(piece.parameter))]
        if len(parts) == 1:
            return [self]
        shards = [Shard(self.flat, part, self.group) for part in parts]
        own = state.pop(self.tensor, None)
        for shard in shards if own is not None else ():
            first, last = self.place_of(shard.pieces[0]), self.place_of(shard.pieces[-1])
            state[shard.tensor] = {
                name: value[first.start : last.stop].clone()
                if is_by_element(self.flat, self.tensor, name, value)
                else copy.deepcopy(value)
                for name, value in own.items()
            }
        return shards


class Part(NamedTuple):
    """What a rank updates of a group: with their gradients, and shards of which none is summed."""

    summed: list[torch.Tensor]
    unsummed: list[tuple[Shard, DeferredBucket]]


class GroupsByShard(list[dict[str, Any]]):
    """An optimizer's groups in a step, which gets some shards after others.

    Their gradients are summed just before, and dropped just after, so that they take little memory.
    """

    def __init__(self, groups: Sequence[dict[str, Any]], parts: Sequence[Part]) -> None:
        super().__init__(groups)
        self._parts = parts
        for group, part in zip(groups, parts, strict=True):
            group["params"] = part.summed

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield each group once, and again if there are many shards to sum."""
        for group, (summed, unsummed) in zip(super().__iter__(), self._parts, strict=True):
            if summed or not unsummed:
                yield group
            for start in range(0, len(unsummed), _NUM_SUMMED):
                some = unsummed[start : start + _NUM_SUMMED]
                for shard, bucket in some:
                    shard.take_from(bucket)
                group["params"] = [shard.tensor for shard, _ in some]
                yield group
                for shard, _ in some:
                    shard.tensor.grad = None


def _elements(parameter: torch.Tensor) -> torch.Tensor:
    gradient = parameter.grad
    assert gradient is not None
    return elements_of(gradient, parameter)


def is_by_element(flat: FlatParameters, owner: torch.Tensor, name: str, value: object) -> bool:
    """Whether this state of ``owner``, a parameter of ``flat`` or a shard, is there by element."""
    has_shape = isinstance(value, torch.Tensor) and value.shape == owner.shape
    return has_shape and (flat.keeps_whole or name not in _SCALARS)


def make_shards(flat: FlatParameters, groups: Sequence[int]) -> list[Shard]:
    """Divide this rank's part of ``flat`` into shards; ``groups`` has each parameter's group."""
    if flat.keeps_whole:
        return [Shard(flat, [piece], groups[piece.parameter]) for piece in flat.pieces]
    shards: list[Shard] = []
    together: list[Piece] = []
    numel = 0
    for parameter, begin, end in flat.pieces:
        for start in range(begin, max(end, begin + 1), _NUMEL):
            piece = Piece(parameter, start, min(end, start + _NUMEL))
            size = piece.stop - piece.start
            group = groups[parameter]
            if together and (numel + size > _NUMEL or groups[together[0].parameter] != group):
                shards.append(Shard(flat, together, groups[together[0].parameter]))
                together, numel = [], 0
            together.append(piece)
            numel += size
    if together:
        shards.append(Shard(flat, together, groups[together[0].parameter]))
    return shards
