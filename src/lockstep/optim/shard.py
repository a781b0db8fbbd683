"""Shards: elements of parameters that one rank updates at once, and their optimizer state."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterator, Mapping, MutableMapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch

from lockstep.grad import ScatteredBucket, UnsummedBucket, unsummed_bucket_of
from lockstep.optim.blocks import Piece
from lockstep.optim.flat import FlatParameters, elements_of

# The largest number of elements of a shard. With gradient and state they stay in a core's caches
# from one operation of the optimizer to the next. In smaller ones, its Python costs more than that
# saves.
_NUMEL = 128 * 1024
# The name of the values of ``master_dtype`` in an ordinary state dict.
MASTER = "master"
# State of torch's element-wise optimizers that a parameter has once, and not for each element.
_SCALARS = {"step", "mu_product", "eta", "mu"}


class OptimizerShard:
    """Consecutive elements of a flat memory, which the optimizer updates as one tensor.

    Their parameters are in one group of the optimizer, and have always had gradients in the same
    steps. So they have the same step count, and the same other state that is not by element.

    Attributes:
        flat: The memory.
        pieces: The elements, by parameter.
        group: The index of the optimizer's parameter group.
        values: The elements; of one dimension unless the memory keeps parameters whole.
        tensor: The tensor that the optimizer updates: the same elements or, if ``master_dtype`` is
            finer than their dtype, a copy of them in that.
        has_master: Whether it is such a copy.
        has_stepped: Whether it has values of its own in such a copy.
    """

    def __init__(
        self,
        flat: FlatParameters,
        pieces: Sequence[Piece],
        group: int,
        master_dtype: torch.dtype | None = None,
    ) -> None:
        self.flat, self.pieces, self.group = flat, list(pieces), group
        self.tensor = self.values = flat.local_part(pieces)
        self._master_dtype = master_dtype
        dtype = update_dtype(self.values.dtype, master_dtype)
        self.has_master = dtype is not self.values.dtype
        if self.has_master:
            self.tensor = self.values.to(dtype)
        self._start = flat.offset_of(self.pieces[0])
        self._gradient: torch.Tensor | None = None
        self._means: torch.Tensor | None = None
        self.has_stepped = False

    def read_values(self) -> None:
        """Copy values that the program has changed since the last step to the master values."""
        if self.has_master:
            master = self.tensor.detach()
            rounded, finer = master.to(self.values.dtype), self.values.to(master.dtype)
            master.copy_(torch.where(rounded == self.values, master, finer))

    def write_values(self) -> None:
        """Copy the updated values to the parameters."""
        if self.has_master:
            self.values.copy_(self.tensor.detach())
            self.has_stepped = True

    def release(self) -> None:
        """Drop the gradient after a step, or after one that has failed."""
        self.tensor.grad = None

    def state_in(self, state: Mapping[Any, dict[str, Any]]) -> dict[str, Any] | None:
        """Return its state in ``state``, with its master values; None if there is neither."""
        held = state.get(self.tensor)
        return {**(held or {}), MASTER: self.tensor} if self.has_stepped else held

    def put_master(self, values: torch.Tensor | None) -> None:
        """Set the master values to saved ``values``; by default to those of the parameters."""
        if self.has_master:
            self.tensor.detach().copy_(self.values if values is None else values)
            self.has_stepped = values is not None

    def take_from(self, bucket: UnsummedBucket) -> None:
        """Set its gradient to the mean of its elements of ``bucket``, which has the same offsets.

        The next shard's may take its place in memory.
        """
        if self._means is None:
            self._means = self.flat.memory_for_means(self.values.numel())
        bucket.sum_into(self._means, self._start, is_often=True)
        self._use(self._means)

    def take_mean(self, bucket: ScatteredBucket) -> None:
        """Set its gradient to its elements of ``bucket``, which has the same offsets."""
        self._use(bucket.means(self._start, self._start + self.values.numel()))

    def take_gradient(self, *, may_be_view: bool = True) -> None:
        """Set its gradient to those of its parameters, all of which have one."""
        parameters = [self.flat.parameters[piece.parameter] for piece in self.pieces]
        is_summed = len(self.pieces) == 1 and unsummed_bucket_of(parameters[0]) is None
        if is_summed and may_be_view:
            _, start, stop = self.pieces[0]
            self._use(_elements(parameters[0])[start:stop])
            return
        if self._gradient is None:
            self._gradient = torch.zeros_like(self.values)
        gradient = self._gradient
        for piece, parameter in zip(self.pieces, parameters, strict=True):
            part, found = gradient[self.place_of(piece)], unsummed_bucket_of(parameter)
            if found is not None:
                bucket, position = found
                bucket.sum_into(part, bucket.contents.offsets[position] + piece.start)
            else:
                part.copy_(_elements(parameter)[piece.start : piece.stop])
        self._use(gradient)

    def _use(self, gradient: torch.Tensor | None) -> None:
        if gradient is not None and gradient.dtype is not self.tensor.dtype:
            gradient = gradient.to(self.tensor.dtype)
        self.tensor.grad = gradient

    def place_of(self, piece: Piece) -> slice:
        """Return the range of ``piece`` in its tensor, which has one dimension."""
        start = self.flat.offset_of(piece) - self._start
        return slice(start, start + piece.stop - piece.start)

    def split(
        self, key: Callable[[int], Hashable], state: MutableMapping[Any, Any]
    ) -> list[OptimizerShard]:
        """Split it, and its state in ``state``, between parameters with different keys.

        ``key`` takes the index of a parameter.
        """
        parts = [list(part) for _, part in groupby(self.pieces, lambda piece: key(piece.parameter))]
        if len(parts) == 1:
            return [self]
        shards = [OptimizerShard(self.flat, part, self.group, self._master_dtype) for part in parts]
        whole = state.pop(self.tensor, None)
        for shard in shards:
            first, last = self.place_of(shard.pieces[0]), self.place_of(shard.pieces[-1])
            place = slice(first.start, last.stop)
            if self.has_stepped:
                shard.put_master(self.tensor[place])
            if whole is not None:
                state[shard.tensor] = {
                    name: value[place].clone()
                    if is_by_element(self.flat, self.tensor, name, value)
                    else copy.deepcopy(value)
                    for name, value in whole.items()
                }
        return shards


class LocalGroup(NamedTuple):
    """What a rank updates of a group: tensors with gradients, and shards with unsummed ones."""

    summed: list[torch.Tensor]
    unsummed: list[tuple[OptimizerShard, UnsummedBucket]]


class GroupsByShard(list[dict[str, Any]]):
    """An optimizer's groups during a step, which pass it unsummed shards one at a time.

    Gradients are summed just before a shard is updated, and dropped just after, so that they take
    little memory.
    """

    def __init__(self, groups: Sequence[dict[str, Any]], parts: Sequence[LocalGroup]) -> None:
        super().__init__(groups)
        self._parts = parts
        for group, part in zip(groups, parts, strict=True):
            group["params"] = part.summed

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield each group with its tensors that have gradients, then with unsummed shards."""
        for group, (summed, unsummed) in zip(super().__iter__(), self._parts, strict=True):
            if summed or not unsummed:
                yield group
            for shard, bucket in unsummed:
                shard.take_from(bucket)
                group["params"] = [shard.tensor]
                yield group
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
    """Whether state of ``owner``, a parameter of ``flat`` or a shard, has a value per element."""
    has_shape = isinstance(value, torch.Tensor) and value.shape == owner.shape
    return has_shape and (flat.keeps_whole or name not in _SCALARS)


def make_shards(
    flat: FlatParameters, groups: Sequence[int], master_dtype: torch.dtype | None
) -> list[OptimizerShard]:
    """Cut this rank's part of ``flat`` into shards; ``groups`` has each parameter's group."""

    def shard_of(pieces: Sequence[Piece]) -> OptimizerShard:
        return OptimizerShard(flat, pieces, groups[pieces[0].parameter], master_dtype)

    shards: list[OptimizerShard] = []
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
