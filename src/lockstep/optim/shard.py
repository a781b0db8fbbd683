"""Shards: elements of parameters that one rank updates at once, and their optimizer state."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, MutableMapping, Sequence
from itertools import groupby
from typing import Any

import torch

from lockstep.optim.flat import FlatParameters, elements_of
from lockstep.optim.layout import Piece
from lockstep.torch_private import _foreach_copy_

# From this size on, parts of parameters are shards by themselves: copying their gradients next to
# those of others would cost more than another call of the optimizer's arithmetic.
_LARGE_NUMEL = 16 * 1024
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
        self._parts: list[torch.Tensor] = []

    def take_gradient(self) -> None:
        """Make the gradients of its parameters that of its tensor."""
        parameters = self.flat.parameters
        if self.flat.keeps_whole:
            self.tensor.grad = parameters[self.pieces[0].parameter].grad
            return
        sources = [
            elements_of(parameters[index].grad, parameters[index])[start:stop]  # type: ignore[arg-type]
            for index, start, stop in self.pieces
        ]
        if len(sources) == 1:
            self.tensor.grad = sources[0]
            return
        if self._gradient is None:
            self._gradient = torch.zeros_like(self.tensor)
            self._parts = [self._gradient[part] for part in map(self.place_of, self.pieces)]
        _foreach_copy_(self._parts, sources)
        self.tensor.grad = self._gradient

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


def is_by_element(flat: FlatParameters, owner: torch.Tensor, name: str, value: object) -> bool:
    """Whether this state of ``owner``, a parameter of ``flat`` or a shard, is there by element."""
    has_shape = isinstance(value, torch.Tensor) and value.shape == owner.shape
    return has_shape and (flat.keeps_whole or name not in _SCALARS)


def make_shards(flat: FlatParameters, groups: Sequence[int]) -> list[Shard]:
    """Divide this rank's part of ``flat`` into shards; ``groups`` has each parameter's group."""
    if flat.keeps_whole:
        return [Shard(flat, [piece], groups[piece.parameter]) for piece in flat.pieces]
    shards = []

    def key(piece: Piece) -> tuple[int, int]:
        is_large = piece.stop - piece.start >= _LARGE_NUMEL
        return groups[piece.parameter], piece.parameter if is_large else -1

    for (group, _), pieces in groupby(flat.pieces, key):
        shards.append(Shard(flat, [*pieces], group))
    return shards
