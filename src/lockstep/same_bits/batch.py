"""The shards of a step's batch: cut of a batch, or as a loader has collated each of them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from lockstep.errors import SplitError


def bounds_of(num_samples: int, num_shards: int) -> list[int]:
    """Return where each shard of ``num_samples`` begins, and the end of the last.

    Sizes differ by one at most, and the first shards are the larger ones: if there are fewer
    samples than shards, the last ones have none.
    """
    least, more = divmod(num_samples, num_shards)
    return [number * least + min(number, more) for number in range(num_shards + 1)]


class ShardedBatch(list[Any]):
    """What a loader with shards gives for a global batch: this rank's shards that have samples.

    Args:
        batches: One for each shard, in their order.
        numbers: The numbers of these shards in the global batch.
        num_shards: The number of all of them, those of other ranks too.
        seed: The seed of the loader.
        place: The epoch, and the number of the batch in it.
    """

    def __init__(
        self,
        batches: Iterable[Any],
        numbers: Sequence[int],
        num_shards: int,
        *,
        seed: int,
        place: tuple[int, int],
    ) -> None:
        super().__init__(batches)
        self.numbers, self.num_shards, self.seed, self.place = numbers, num_shards, seed, place
        self._num_uses = 0

    def next_use(self) -> int:
        """Return how often :func:`lockstep.shards` has taken it before."""
        self._num_uses += 1
        return self._num_uses - 1


def cut(batch: Any, num_shards: int, shards: range) -> tuple[list[Any], list[int]]:
    """Return those of ``shards`` of ``batch`` that have samples, and their numbers.

    Each has memory of its own: float32 products depend on the address of their factors. Shown by
    test_each_shard_has_memory_of_its_own.

    Raises:
        SplitError: If there is no tensor in it, or two have different numbers of samples.
    """
    lengths = [*_lengths(batch, "batch")]
    if not lengths:
        raise SplitError(
            f"shards() got a batch without a tensor, a {type(batch).__name__}, and can't tell how "
            "many samples it has. Give tensors whose first dimension is that of samples, in "
            "tuples, lists or dicts; or let DataLoader(shards=...) make the shards."
        )
    (first, num_samples), *others = lengths
    for name, length in others:
        if length != num_samples:
            raise SplitError(
                f"shards() got a batch in which {first} has {num_samples} samples and {name} has "
                f"{length}. Each tensor's first dimension is to be that of samples."
            )
    bounds = bounds_of(num_samples, num_shards)
    numbers = [each for each in shards if bounds[each] < bounds[each + 1]]
    parts = [_part(batch, bounds[each], bounds[each + 1], num_samples) for each in numbers]
    return parts, numbers


def _lengths(value: Any, name: str) -> Iterable[tuple[str, int]]:
    """Yield the names of the tensors in ``value``, and their numbers of samples."""
    if isinstance(value, torch.Tensor):
        if value.dim():
            yield name, len(value)
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _lengths(each, f"{name}[{key!r}]")
    elif isinstance(value, list | tuple):
        for position, each in enumerate(value):
            yield from _lengths(each, f"{name}[{position}]")
    elif _is_record(value):
        for field in dataclasses.fields(value):
            yield from _lengths(getattr(value, field.name), f"{name}.{field.name}")


def _part(value: Any, start: int, stop: int, num_samples: int) -> Any:
    if isinstance(value, torch.Tensor):
        return value[start:stop].clone() if value.dim() else value.clone()
    if isinstance(value, Mapping):
        parts = {key: _part(each, start, stop, num_samples) for key, each in value.items()}
        copied: Any = value.copy() if hasattr(value, "copy") else {}  # of the same class
        copied.update(parts)
        return copied
    if isinstance(value, list | tuple):
        if len(value) == num_samples and not any(map(_is_container, value)):
            return value[start:stop]  # of strings, say, one for each sample
        parts_of_it = map(
            _part,
            value,
            itertools.repeat(start),
            itertools.repeat(stop),
            itertools.repeat(num_samples),
        )
        is_named = hasattr(value, "_fields")
        return type(value)(*parts_of_it) if is_named else type(value)(parts_of_it)
    if _is_record(value):
        fields = {
            field.name: _part(getattr(value, field.name), start, stop, num_samples)
            for field in dataclasses.fields(value)
        }
        return dataclasses.replace(value, **fields)
    return value


def _is_container(value: object) -> bool:
    is_plain = isinstance(value, torch.Tensor | Mapping | list | tuple)
    return is_plain or _is_record(value)


def _is_record(value: object) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)
