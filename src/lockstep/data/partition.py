"""Data: the ranks' parts of a dataset and of a global batch, with every element in exactly one.

Ranks don't communicate: the same dataset, sizes and seed give the same parts everywhere.
"""

from __future__ import annotations

import itertools
import math
import numbers
import random
import reprlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from fractions import Fraction
from functools import lru_cache
from typing import Generic, Protocol, TypeVar

from torch.utils.data import Dataset, IterableDataset

from lockstep import arguments, errors

_T_co = TypeVar("_T_co", covariant=True)

# The largest accepted difference of the sum of fractions from 1. Ten float32 of 0.1 are off by
# 1.5e-8, while a forgotten digit, as in [0.333, 0.333, 0.333], is off by 1e-3.
_TOLERANCE = Fraction(1, 10**6)


class SizedDataset(Protocol[_T_co]):
    """A map-style dataset, a list or a tensor."""

    def __len__(self) -> int:
        """The number of elements."""

    def __getitem__(self, index: int, /) -> _T_co:
        """The element at ``index``."""


class Partition(Dataset[_T_co]):
    """Part of a dataset, itself a dataset. ::

        odd = lockstep.Partition(dataset, range(1, len(dataset), 2))
        loader = DataLoader(odd, batch_size=16)

    Args:
        data: The whole dataset.
        indices: The indices of this part's elements, in the order of the part.

    Raises:
        TypeError: If ``data`` or ``indices`` can't be indexed.

    Source: PyTorch's tutorial "Writing Distributed Applications".
    """

    def __init__(self, data: SizedDataset[_T_co], indices: Sequence[int]) -> None:
        if not hasattr(data, "__getitem__"):
            raise TypeError(arguments.refusal("data", data, "a dataset that can be indexed"))
        if not _is_sized_and_indexed(indices):
            raise TypeError(arguments.refusal("indices", indices, "a sequence of indices"))
        self.data = data
        self.indices = indices

    def __len__(self) -> int:
        """The number of elements in this part."""
        return len(self.indices)

    def __getitem__(self, index: int) -> _T_co:
        """The element at ``index`` of this part; negative indices count from its end."""
        index = arguments.as_whole_number("index", index)
        if not -len(self) <= index < len(self):
            raise IndexError(f"index {index} is out of range for a part of {len(self)} elements")
        return self.data[self.indices[index]]

    def __iter__(self) -> Iterator[_T_co]:
        """The elements of this part, in its order."""
        # Without this method, an IndexError in the dataset would silently end the iteration.
        return (self.data[index] for index in self.indices)

    def __getitems__(self, indices: Sequence[int]) -> Sequence[_T_co]:
        """Several elements at once; torch's DataLoader reads batches with it."""
        whole = [self.indices[index] for index in indices]
        # A dataset may have its own way to read a batch at once (from a table, over a network).
        read: Callable[[list[int]], Sequence[_T_co]] | None
        read = getattr(self.data, "__getitems__", None)
        return read(whole) if callable(read) else [self.data[index] for index in whole]


class DataPartitioner(Generic[_T_co]):
    """A dataset divided into parts, of which each rank uses one. ::

        parts = lockstep.DataPartitioner(dataset, [0.5, 0.5])
        loader = DataLoader(parts.use(world.rank), batch_size=16)

    Args:
        data: The dataset to divide.
        sizes: As for :func:`partition`.
        seed: As for :func:`partition`.

    Raises:
        SplitError: If ``data`` can't be divided so.
        TypeError: If ``data`` has no length, a size is not a number, or the seed not a whole one.

    Source: PyTorch's tutorial "Writing Distributed Applications". The same seed gives the same
    order; sizes are rounded so that no element is left out, where the tutorial drops some.
    """

    def __init__(
        self,
        data: SizedDataset[_T_co],
        sizes: Sequence[float] = (0.7, 0.2, 0.1),
        seed: int | None = 1234,
    ) -> None:
        self.data = data
        self.partitions = partition(data, sizes, seed)

    def use(self, part: int) -> Partition[_T_co]:
        """Return the part with this number, from 0 to ``len(sizes) - 1``, such as a rank.

        Raises:
            IndexError: If there is no such part; negative numbers don't count from the end.
        """
        part = arguments.as_whole_number("part", part)
        if not 0 <= part < len(self.partitions):
            raise IndexError(
                f"There is no part {part} of {len(self.partitions)}, numbered from 0. "
                "Give one size for each rank."
            )
        return self.partitions[part]


def partition(
    dataset: SizedDataset[_T_co], sizes: Sequence[float], seed: int | None = 1234
) -> list[Partition[_T_co]]:
    """Divide ``dataset`` into shuffled parts, with every element in exactly one of them. ::

        train, held_out = lockstep.partition(dataset, [0.9, 0.1])
        mine = lockstep.partition(train, [1 / world.world_size] * world.world_size)[world.rank]

    Args:
        dataset: The dataset to divide; it has a length and is indexed from 0.
        sizes: One per part, 0 or more. If all are whole numbers (``int``), they count elements and
            add up to ``len(dataset)``; if any is a float, they are fractions and add up to 1.
            Fractions of an element are rounded by largest remainder, ties to the first part, so
            each part is less than one element from its exact size.
        seed: Seed of the shuffle; every rank must give the same. None keeps the order.

    Returns:
        One part per size, in their order: ``partition(dataset, sizes)[world.rank]``.

    Raises:
        SplitError: If there is no size, one is negative or not finite, or their sum is wrong.
        TypeError: If ``dataset`` has no length, a size is not a number, or the seed not a whole
            one. (For Python, NaN is another seed in each process.)
    """
    if isinstance(dataset, IterableDataset) or not _is_sized_and_indexed(dataset):
        raise TypeError(
            f"{type(dataset).__name__} is not a dataset of known length, so it can't be divided "
            "beforehand. Give a map-style dataset, with __len__ and __getitem__."
        )
    counts = _counts(_checked_numbers(sizes), len(dataset))
    order: Sequence[int] = range(len(dataset))
    if seed is not None:
        seed = arguments.as_whole_number("seed", seed, "a whole number, or None to keep the order")
        order = array("q", order)  # 8 bytes an element
        random.Random(seed).shuffle(order)
    ends = itertools.accumulate(counts)
    return [Partition(dataset, order[e - n : e]) for n, e in zip(counts, ends, strict=True)]


def _is_sized_and_indexed(value: object) -> bool:
    has_both = isinstance(value, Sized) and hasattr(value, "__getitem__")
    return has_both and getattr(value, "ndim", 1) != 0  # not tensors without dimensions


def _checked_numbers(sizes: Iterable[object]) -> list[int | float]:
    if not isinstance(sizes, Iterable) or getattr(sizes, "ndim", 1) == 0:
        raise TypeError(f"sizes is {sizes!r}, not one size for each part, such as [0.5, 0.5].")
    checked: list[int | float] = []
    for part, size in enumerate(sizes):
        # A bool is an int, but [True, False] is hardly meant as [1, 0].
        if isinstance(size, bool) or not isinstance(size, numbers.Real):
            raise TypeError(
                f"sizes[{part}] is {size!r}, a {type(size).__name__}; "
                "a fraction (float) or a count (int) is needed."
            )
        number = int(size) if isinstance(size, numbers.Integral) else float(size)
        if number < 0 or (isinstance(number, float) and not math.isfinite(number)):
            raise errors.SplitError(f"sizes[{part}] is {size}; a part has a size from 0 up.")
        checked.append(number)
    if not checked:
        raise errors.SplitError("sizes is empty. Give one size for each part, such as [0.5, 0.5].")
    return checked


def _counts(sizes: list[int | float], num_elements: int) -> list[int]:
    counts = [size for size in sizes if isinstance(size, int)]
    if len(counts) < len(sizes):
        return _round_fractions(sizes, num_elements)
    rest = num_elements - sum(counts)
    if rest:
        todo = f"Add a last part of {rest} for the rest" if rest > 0 else f"Take {-rest} away"
        raise errors.SplitError(
            f"sizes {reprlib.repr(sizes)} count {sum(counts)} elements, but the dataset has "
            f"{num_elements}. {todo}, or give floats for fractions."
        )
    return counts


def _round_fractions(sizes: list[int | float], num_elements: int) -> list[int]:
    """Round by largest remainder, in exact arithmetic."""
    if max(sizes) > 1 + _TOLERANCE:
        raise errors.SplitError(
            f"sizes {reprlib.repr(sizes)} has a float in it, so all are fractions, but "
            f"{max(sizes)} is more than the whole. Give only whole numbers (int) to count elements."
        )
    fractions = [_simplest_fraction(size) for size in sizes]
    total = sum(fractions, Fraction())
    if abs(total - 1) > _TOLERANCE:
        rest = float(1 - total)
        todo = f"Add a last part of {rest:.9g} for the rest" if rest > 0 else "Make them smaller"
        raise errors.SplitError(
            f"sizes {reprlib.repr(sizes)} are fractions that add up to {float(total):.9g}, "
            f"not to 1. {todo}, or divide each by their sum."
        )
    return _in_proportion(num_elements, fractions)


def _in_proportion(number: int, shares: Sequence[int | Fraction]) -> list[int]:
    """Divide ``number`` by largest remainder; ties go to the first parts."""
    total = sum(shares)
    sizes = [int(number * share // total) for share in shares]
    remainders = [number * share % total for share in shares]
    largest_first = sorted(range(len(shares)), key=lambda part: -remainders[part])
    for part in largest_first[: number - sum(sizes)]:
        sizes[part] += 1
    return sizes


@lru_cache(maxsize=64)
def cuts(num_samples: int, shares: tuple[int, ...]) -> tuple[int, ...]:
    """Return where the ranks' parts of ``num_samples`` begin, and the end of the last.

    Parts are in proportion to ``shares``, rounded by largest remainder; ties go to lower ranks.
    """
    return (0, *itertools.accumulate(_in_proportion(num_samples, shares)))


def _simplest_fraction(size: float) -> Fraction:
    """The simplest fraction that rounds to this float: 7/10 for 0.7, 1/3 for 1/3."""
    # The binary 0.7 is slightly less than 7/10, so in [0.7, 0.3] of 5 elements the tie of 3.5 and
    # 1.5 would go to the wrong part. Shown by test_tie_goes_to_the_lower_part.
    exact = Fraction(size)
    simpler = (exact.limit_denominator(10**digits) for digits in range(1, 17))
    return next((fraction for fraction in simpler if float(fraction) == size), exact)


def batch_share(batch_size: int, rank: int, world_size: int) -> int:
    """The number of this rank's samples in a global batch, as :func:`batch_slice` splits it."""
    share = batch_slice(batch_size, rank, world_size)
    return int(share.stop - share.start)


def batch_slice(batch_size: int, rank: int, world_size: int) -> slice:
    """This rank's samples of a global batch: ``batch[batch_slice(...)]``.

    The ranks' slices cover the batch in the order of the ranks. Their lengths add up to
    ``batch_size`` and differ by one at most, the first ranks having one more.

    Args:
        batch_size: Samples in the global batch, over all ranks; at least ``world_size``.
        rank: This rank, from 0 to ``world_size - 1``.
        world_size: The number of ranks.

    Raises:
        SplitError: If a rank would have no sample, or there is no such rank.
        TypeError: If an argument is not a whole number.
    """
    batch_size = arguments.as_whole_number("batch_size", batch_size)
    rank = arguments.as_whole_number("rank", rank)
    world_size = arguments.as_whole_number("world_size", world_size)
    if not 0 <= rank < world_size:
        raise errors.SplitError(
            f"There is no rank {rank} in a world of {world_size}: "
            "ranks count from 0 to world_size - 1. Take both from lockstep.init()."
        )
    if batch_size < world_size:
        raise errors.SplitError(
            f"A global batch of {batch_size} can't be split over a world size of {world_size}: "
            "each rank needs a sample at least. Use a larger batch or fewer ranks."
        )
    bounds = cuts(batch_size, (1,) * world_size)
    return slice(bounds[rank], bounds[rank + 1])


def epoch_shares(num_samples: int, batch_size: int, world_size: int) -> list[int]:
    """The number of samples of each rank for an epoch in which all ranks take equally many steps.

    Even parts don't suffice: 129 samples in global batches of 128 over 2 ranks would be parts of 65
    and 64, and rank 0 alone would take a second step and wait in it for ever. Here every global
    batch, the short last one too, is split over all ranks.

    Args:
        num_samples: Samples in the dataset.
        batch_size: Samples in a global batch, over all ranks; at least ``world_size``.
        world_size: The number of ranks.

    Returns:
        Sizes for :func:`lockstep.partition`, one per rank, with the sum ``num_samples``. A loader
        of :func:`batch_share` samples at a time then gives every rank equally many batches.

    Raises:
        SplitError: If a batch, the last one included, has fewer samples than there are ranks, or
            ``num_samples`` or ``world_size`` is negative, or ``world_size`` is 0.
        TypeError: If an argument is not a whole number.
    """
    num_samples = arguments.as_whole_number("num_samples", num_samples)
    batch_size = arguments.as_whole_number("batch_size", batch_size)
    world_size = arguments.as_whole_number("world_size", world_size)
    if num_samples < 0 or world_size < 1:
        raise errors.SplitError(
            f"num_samples is {num_samples} and world_size is {world_size}, but a dataset has 0 "
            "samples or more, and there is one rank at least. Take the ranks from lockstep.init()."
        )
    num_full, last = divmod(num_samples, batch_size) if batch_size > 0 else (1, 0)
    if 0 < last < world_size:
        raise errors.SplitError(
            f"{num_samples} samples in global batches of {batch_size} leave {last} for the last "
            f"batch, which can't be split over {world_size} ranks. Use another batch size, or "
            f"leave {last} of the samples out."
        )
    return [
        num_full * batch_share(batch_size, rank, world_size)
        + (batch_share(last, rank, world_size) if last else 0)
        for rank in range(world_size)
    ]
