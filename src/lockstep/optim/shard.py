"""Shards: elements of parameters that one rank updates at once, and their optimizer state."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterator, Mapping, MutableMapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch

from lockstep.grad import DeferredBucket, pending_bucket_of
from lockstep.optim.flat import FlatParameters, elements_of
from lockstep.optim.layout import Piece

# The most elements of a shard: with gradient and state they stay in a core's own cache from one
# operation of the optimizer to the next.
_NUMEL = 64 * 1024
# How many are summed at once, if they are so large.
_NUM_SUMMED = 16
# The name of the finer values in an ordinary state dict.
MASTER = "master"
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
        values: The elements; of one dimension unless the memory keeps parameters whole.
        tensor: What the optimizer updates: the same elements or, if they have less than the
            precision of ``master_dtype``, their values in that.
    """

    def __init__(
        self,
        flat: FlatParameters,
        pieces: Sequence[Piece],
        group: int,
        master_dtype: torch.dtype | None = None,
    ) -> None:
        self.flat, self.pieces, self.group = flat, list(pieces), group
        self.tensor = self.values = flat.own_part(pieces)
        self._master_dtype = master_dtype
        dtype = update_dtype(self.values.dtype, master_dtype)
        if dtype is not self.values.dtype:
            self.tensor = self.values.to(dtype)
        self._gradient: torch.Tensor | None = None
        self._has_stepped = False

    @property
    def has_master(self) -> bool:
        """Whether the optimizer updates finer values than the parameters'."""
        return self.tensor is not self.values

    def read_values(self) -> None:
        """Take over what the program has changed in the parameters since the last step."""
        if self.has_master:
            rounded, finer = self.tensor.to(self.values.dtype), self.values.to(self.tensor.dtype)
            self.tensor.copy_(torch.where(rounded == self.values, self.tensor, finer))

    def write_values(self) -> None:
        """Let the parameters have what the optimizer has made of its tensor."""
        if self.has_master:
            self.values.copy_(self.tensor)
            self._has_stepped = True

    def state_in(self, state: Mapping[Any, dict[str, Any]]) -> dict[str, Any] | None:
        """Return its part of ``state``, and what it has of its own; None if there is nothing."""
        own = state.get(self.tensor)
        return {**(own or {}), MASTER: self.tensor} if self._has_stepped else own

    def put_master(self, values: torch.Tensor | None) -> None:
        """Go on from saved ``values`` of its tensor; by default from those of the parameters."""
        if self.has_master:
            self.tensor.copy_(self.values if values is None else values)
            self._has_stepped = values is not None

    def take_from(self, bucket: DeferredBucket) -> None:
        """Make the mean of the elements of ``bucket`` that are where its own are its gradient."""
        start = self.flat.offset_of(self.pieces[0])
        self._use(bucket.new_sum(start, start + self.values.numel()))

    def take_gradient(self) -> None:
        """Make the gradients of its parameters, all of which have one, that of its tensor."""
        parameters = [self.flat.parameters[piece.parameter] for piece in self.pieces]
        if self.flat.keeps_whole:
            self._use(parameters[0].grad)
            return
        if len(self.pieces) == 1 and pending_bucket_of(parameters[0]) is None:
            _, start, stop = self.pieces[0]
            self._use(_elements(parameters[0])[start:stop])
            return
        if self._gradient is None:
            self._gradient = torch.zeros_like(self.values)
        own = self._gradient
        for piece, parameter in zip(self.pieces, parameters, strict=True):
            part, found = own[self.place_of(piece)], pending_bucket_of(parameter)
            if found is not None:
                bucket, position = found
                bucket.sum_into(part, bucket.offset_of(position) + piece.start)
            else:
                part.copy_(_elements(parameter)[piece.start : piece.stop])
        self._use(own)

    def _use(self, gradient: torch.Tensor | None) -> None:
        self.tensor.grad = None if gradient is None else gradient.to(self.tensor.dtype)

    def place_of(self, piece: Piece) -> slice:
        """Return where the elements of ``piece`` are in its tensor, if that has one dimension."""
        start = self.flat.offset_of(piece) - self.flat.offset_of(self.pieces[0])
        return slice(start, start + piece.stop - piece.start)

    def split(self, key: Callable[[int], Hashable], state: MutableMapping[Any, Any]) -> list[Shard]:
        """Divide it where ``key`` of neighbouring parameters differs, and its part of ``state``."""
        parts = [list(part) for _, part in groupby(self.pieces, lambda piece: key(piece.parameter))]
        if len(parts) == 1:
            return [self]
        shards = [Shard(self.flat, part, self.group, self._master_dtype) for part in parts]
        own = state.pop(self.tensor, None)
        for shard in shards:
            first, last = self.place_of(shard.pieces[0]), self.place_of(shard.pieces[-1])
            place = slice(first.start, last.stop)
            if self._has_stepped:
                shard.put_master(self.tensor[place])
            if own is not None:
                state[shard.tensor] = {
                    name: value[place].clone()
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


def update_dtype(dtype: torch.dtype, master_dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype in which parameters of ``dtype`` are updated: the finer one."""
    if master_dtype is None or not dtype.is_floating_point:
        return dtype
    return min(master_dtype, dtype, key=lambda each: torch.finfo(each).eps)


def is_by_element(flat: FlatParameters, owner: torch.Tensor, name: str, value: object) -> bool:
    """Whether this state of ``owner``, a parameter of ``flat`` or a shard, is there by element."""
    has_shape = isinstance(value, torch.Tensor) and value.shape == owner.shape
    return has_shape and (flat.keeps_whole or name not in _SCALARS)


def make_shards(
    flat: FlatParameters, groups: Sequence[int], master_dtype: torch.dtype | None
) -> list[Shard]:
    """Divide this rank's part of ``flat`` into shards; ``groups`` has each parameter's group."""

    def shard_of(pieces: Sequence[Piece]) -> Shard:
        return Shard(flat, pieces, groups[pieces[0].parameter], master_dtype)

    if flat.keeps_whole:
        return [shard_of([piece]) for piece in flat.pieces]
    shards: list[Shard] = []
    together: list[Piece] = []
    numel = 0
    for parameter, begin, end in flat.pieces:
        for start in range(begin, max(end, begin + 1), _NUMEL):
            piece = Piece(parameter, start, min(end, start + _NUMEL))
            size = piece.stop - piece.start
            group = groups[parameter]
            if together and (numel + size > _NUMEL or groups[together[0].parameter] != group):
                shards.append(shard_of(together))
                together, numel = [], 0
            together.append(piece)
            numel += size
    if together:
        shards.append(shard_of(together))
    return shards
