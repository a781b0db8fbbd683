"""Global batches: their order, the share of each rank, and how it is read."""

from __future__ import annotations

import itertools
import operator
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
)

from lockstep.comm import bytes_of
from lockstep.data.dataset_generators import RandomState, generators_in
from lockstep.data.faults import ends_worker, samples_in_words, telling
from lockstep.data.order import Order
from lockstep.errors import SplitError
from lockstep.generators import Generator, global_generators, mixed
from lockstep.same_bits import exclusive

# How many global batches are drawn from a sampler at once.
_NUM_DRAWN = 64
# The golden ratio in 32 bits, and the bits of a seed.
_ODD, _MASK = 0x9E3779B1, 2**32 - 1


class LocalBatch(NamedTuple):
    """A rank's samples in a global batch.

    If it has none, ``is_empty`` is set, and there is the index of one sample of another rank, from
    which an empty batch of the same structure is made.
    """

    indices: Sequence[Any]
    seed: int  # of the epoch's random numbers
    first: int  # the position of the first sample in the epoch
    is_empty: bool = False  # whether the samples aren't this rank's
    is_one: bool = False  # whether the dataset makes a whole batch of the only index


class Start(NamedTuple):
    """Where batches begin, after those that are skipped."""

    number: int  # of the first batch
    position: int  # of its first sample in the epoch
    checksum: int | None  # of the batches before it; None if they are the same in any case


class GlobalBatches:
    """The global batches of an epoch, as a user's or torch's batch sampler makes them.

    Those of torch's own samplers are tensors of indices: a rank then makes numbers of its own
    indices alone, however many ranks there are.

    Whatever random numbers the samplers draw are from ``seed`` and the epoch.

    Args:
        batches: Gives lists of indices.
        samplers: All samplers in it, of which some may have a ``generator`` or a ``set_epoch()``.
        seed: The seed.
        epoch: The epoch.
        may_repeat: Whether an index may come several times in an epoch.
    """

    def __init__(
        self,
        batches: Iterable[Any],
        samplers: Sequence[Any],
        seed: int,
        epoch: int,
        *,
        may_repeat: bool,
    ) -> None:
        self._random = RandomState(mixed(seed, epoch, -1))
        self._seen = None if may_repeat else _Seen(epoch)
        self._drawn: list[Any] = []
        for sampler in samplers:
            if isinstance(generator := getattr(sampler, "generator", None), torch.Generator):
                generator.manual_seed(mixed(seed, epoch, -2))
            if callable(set_epoch := getattr(sampler, "set_epoch", None)):
                set_epoch(epoch)
        self._sampler: Any = batches
        with self._random():
            self._order = _order_of(batches)
            self._batches = iter(batches) if self._order is None else self._ordered(0)

    def _ordered(self, start: int) -> Iterator[Any]:
        assert self._order is not None
        size, drop_last = self._sampler.batch_size, self._sampler.drop_last
        return self._order.batches(size, drop_last=drop_last, start=start)

    def peek(self) -> list[Any]:
        """Return the next batches, as many as are drawn at once."""
        if not self._drawn:
            with self._random():
                self._drawn = [*itertools.islice(self._batches, _NUM_DRAWN)]
        return self._drawn

    def skip(self, num_batches: int) -> Start:
        """Leave out the first batches, before any was given; fewer if there aren't so many."""
        if self._order is not None and num_batches:
            num_batches = min(num_batches, len(self._sampler))
            position = min(num_batches * self._sampler.batch_size, self._order.length)
            self._drawn, self._batches = [], self._ordered(position)
            return Start(num_batches, position, self._order.checksum(position))
        number = position = checksum = 0
        for batch in itertools.islice(self, num_batches):
            number += 1
            position += num_samples(batch)
            checksum = digest(batch, checksum)
        return Start(number, position, checksum)

    def __iter__(self) -> Iterator[Any]:
        """Yield each global batch."""
        while self.peek():
            batch = self._drawn.pop(0)
            if self._seen is not None:
                self._seen.add(batch)
            yield batch


class _Seen:
    """The indices that came in an epoch; whole numbers take a byte each if most of them come.

    Args:
        epoch: The number of the epoch.
    """

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch
        self._blocks: dict[int, int] = {}  # a bit for each of 256 numbers
        self._others: set[Any] = set()

    def add(self, batch: Any) -> None:
        """Note the indices of a batch.

        Raises:
            SplitError: If one of them came before.
        """
        indices: Sequence[Any] = batch if isinstance(batch, list | tuple) else [batch]
        if isinstance(batch, torch.Tensor) and batch.dim():
            indices = batch.tolist()
        if indices and isinstance(indices[0], torch.Tensor):  # equal ones have different hashes
            indices = [index.item() for index in indices]
        elif indices and type(indices[0]).__hash__ is None:  # such as a slice
            indices = [*map(repr, indices)]
        for index in indices:
            if not self._is_new(index):
                raise SplitError(
                    f"The sampler gave {index} twice in epoch {self._epoch}, so that a sample "
                    "would count twice. If that is what you want, as in sampling with "
                    "replacement, set its attribute 'replacement' to True."
                )

    def _is_new(self, index: Any) -> bool:
        try:
            number = operator.index(index)
        except TypeError:
            before = len(self._others)
            self._others.add(index)
            return len(self._others) > before
        block, bit = self._blocks.get(number >> 8, 0), 1 << (number & 255)
        self._blocks[number >> 8] = block | bit
        return not block & bit


def samplers_in(sampler: Any) -> list[Any]:
    """Return ``sampler`` and those inside of it, such as that of a batch sampler."""
    found: list[Any] = []
    while sampler is not None and not any(sampler is each for each in found):
        found.append(sampler)
        sampler = getattr(sampler, "sampler", None)
    return found


def is_list(batch: Any) -> bool:
    """Whether a batch that a sampler gave is a list of indices, which ranks can share."""
    return isinstance(batch, list | tuple) or getattr(batch, "ndim", 0) == 1


def num_samples(batch: Any) -> int:
    """Return the number of indices of a batch that a sampler gave."""
    return len(batch) if is_list(batch) else 1


def length_of(dataset: Any) -> int | None:
    """Return the number of samples of ``dataset``, if it tells."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


def local_batch(batch: Any, start: int, stop: int, seed: int, position: int) -> LocalBatch:
    """Return what is read of the indices from ``start`` to ``stop`` of a global batch.

    ``position`` is that of its first sample in the epoch.
    """
    is_empty = start == stop and len(batch) > 0
    indices = batch[:1] if is_empty else batch[start:stop]
    indices = indices.tolist() if isinstance(indices, torch.Tensor) else indices
    return LocalBatch([*indices], seed, position + start, is_empty)


def _order_of(batches: Any) -> Order | None:
    """Return the order of the samples in ``batches``, if torch's own samplers make them."""
    sampler: Any = getattr(batches, "sampler", None)
    if type(batches) is not BatchSampler or type(sampler) not in (RandomSampler, SequentialSampler):
        return None
    length = len(sampler.data_source)
    if type(sampler) is SequentialSampler:
        return Order(length)
    if sampler.replacement or sampler.num_samples != length or sampler.generator is None:
        return None
    return Order(length, sampler.generator)


def digest(batch: Any, before: int = 0) -> int:
    """Return a checksum of the indices of a batch, and of those ``before`` it."""
    if isinstance(batch, torch.Tensor):
        indices = batch.cpu().contiguous()  # kept while its memory is read
        return zlib.crc32(bytes_of(indices), before)
    try:
        payload = array("q", batch).tobytes()
    except TypeError:  # one index, or one that isn't a number
        payload = repr(batch).encode()
    return zlib.crc32(payload, before)


class Reader:
    """Reads a part of a batch; the dataset of torch's own loader, whose workers have copies.

    Each sample's random numbers, such as those of an augmentation, are from the seed, the epoch and
    the sample's position in it: the same for any number of ranks and workers. That costs only a
    program that draws some: a part in which a generator is found to be drawn from, for the first
    time, is read once more with its samples' seeds.

    Args:
        dataset: The user's.
        collate: Makes a batch of a list of samples; or of what the dataset returns for a list of
            indices, if it makes batches itself.
        rank: The rank that reads.
        makes_batches: Whether the dataset makes batches itself.
    """

    def __init__(
        self, dataset: Any, collate: Callable[[Any], Any], rank: int, *, makes_batches: bool
    ) -> None:
        self.dataset, self._collate, self._rank = dataset, collate, rank
        # Of a worker that is to read no more in this epoch: its seed, and what it raises.
        self._last_words: tuple[int, BaseException] | None = None
        self._makes_batches = makes_batches
        # The position in a part of the sample that is being read, if it is a single one.
        self._at: int | None = None
        # What default_collate makes of such samples one by one can be had at once.
        is_collated = collate is default_collate and makes_batches is False
        self._has_tensors = type(dataset) is TensorDataset and is_collated
        self._reset()

    def _reset(self) -> None:
        self._unused = [*global_generators().values()]
        self._unused += generators_in(self.dataset, self._unused)
        self._used: list[Generator] = []
        self._is_first = True

    def __getstate__(self) -> dict[str, Any]:
        """Return what a worker's process needs, which has generators of its own."""
        left_out = ("_unused", "_used", "_is_first")
        return {name: value for name, value in vars(self).items() if name not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Begin in a worker's process."""
        vars(self).update(state)
        self._reset()

    def __getitem__(self, part: LocalBatch) -> Any:
        """Return the batch of ``part``, without samples if it has none."""
        self._at = None
        if self._last_words is not None and self._last_words[0] == part.seed:
            raise self._last_words[1]
        try:
            return self._batch_of(part)
        except BaseException as error:
            told = telling(error, self._place_in(part))
            if told is error:
                raise
            self._last_words = (part.seed, told) if ends_worker(error, told) else None
        raise told  # behind what it has as its cause, if that can be shown

    def _batch_of(self, part: LocalBatch) -> Any:
        if self._has_tensors and (rows := _rows(self.dataset.tensors, part)) is not None:
            return [row[:0] for row in rows] if part.is_empty else rows
        with exclusive:
            batch = self._read_seeded(part)
            if not part.is_empty:
                return batch
            twice = self._read_seeded(LocalBatch([part.indices[0]] * 2, part.seed, part.first))
        return without_samples(batch, twice)

    def _place_in(self, part: LocalBatch) -> str:
        """Say which samples of ``part`` are being read, or put into a batch."""
        indices, first, what = part.indices, part.first, "in reading or collating"
        if self._at is not None:
            indices, first, what = indices[self._at : self._at + 1], first + self._at, "in reading"
        return f"This was {what} {samples_in_words(indices, first)}, on rank {self._rank}."

    def _read_seeded(self, part: LocalBatch) -> Any:
        for generator in (*self._unused, *self._used):
            generator.begin()
        try:
            batch = self._read(part)
            # What is drawn may depend on what other generators gave: until nothing new is found.
            while found := [each for each in self._unused if each.has_drawn()]:
                self._used += found
                self._unused = [each for each in self._unused if each not in found]
                for generator in found:
                    generator.rewind()
                batch = self._read(part)
            if self._is_first:  # a dataset may make generators with its first sample
                self._is_first = False
                if made := generators_in(self.dataset, [*self._unused, *self._used]):
                    for generator in made:
                        generator.begin()
                    self._used += made
                    batch = self._read(part)
            return batch
        finally:
            for generator in self._used:
                generator.rewind()

    def _read(self, part: LocalBatch) -> Any:
        dataset: Any = self.dataset
        if self._makes_batches:
            self._seed(part.seed, part.first)
            return self._collate(dataset[part.indices[0] if part.is_one else [*part.indices]])
        if self._used:
            samples = []
            seeds = [generator.seed for generator in self._used]
            # torch's generator takes 32 bits of a seed. An odd factor keeps those of positions
            # apart, and takes less time than mixing.
            start = mixed(part.seed)
            for self._at, index in enumerate(part.indices):
                number = (start + (part.first + self._at) * _ODD) & _MASK
                for seed in seeds:
                    seed(number)
                samples.append(dataset[index])
            self._at = None
            self._seed(part.seed, part.first, -3)
            return self._collate(samples)
        if callable(read := getattr(dataset, "__getitems__", None)):
            return self._collate(read([*part.indices]))
        samples = []
        for self._at, index in enumerate(part.indices):
            samples.append(dataset[index])
        self._at = None
        return self._collate(samples)

    def _seed(self, *numbers: int) -> None:
        if self._used:
            seed = mixed(*numbers)
            for generator in self._used:
                generator.seed(seed)


def _rows(tensors: Sequence[torch.Tensor], part: LocalBatch) -> list[torch.Tensor] | None:
    """Return the samples of ``part``; None if it has something else than whole numbers."""
    try:
        indices = torch.tensor(part.indices, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        return None
    if indices.dtype != torch.int64 or indices.dim() != 1:
        return None
    return [tensor[indices] for tensor in tensors]


def without_samples(batch: Any, twice: Any = None) -> Any:
    """Return an empty batch of the structure of ``batch``.

    Args:
        batch: One of a single sample, or any if there is no ``twice``.
        twice: The same with that sample twice, which shows where there is one entry for each
            sample. Without it, tensors have samples in their first dimension.

    Raises:
        SplitError: If something in it has no entry for each sample.
    """
    if isinstance(batch, torch.Tensor):
        for dim, length in enumerate(batch.shape):
            if twice is None or (length and twice.shape[dim] == 2 * length):
                return batch.narrow(dim, 0, 0)
        raise _cannot_be_cut(f"a tensor of shape {tuple(batch.shape)}")
    if isinstance(batch, dict):
        values = {
            name: without_samples(value, None if twice is None else twice[name])
            for name, value in batch.items()
        }
        copied = batch.copy()  # of the same class
        copied.update(values)
        return copied
    if isinstance(batch, list | tuple):
        if twice is not None and len(batch) > 0 and len(twice) == 2 * len(batch):
            return batch[:0]
        is_nested = any(isinstance(e, torch.Tensor | list | tuple | dict) for e in batch)
        if isinstance(batch, list) and twice is None and not is_nested:
            return []  # of strings, say, one for each sample
        parts = map(without_samples, batch, itertools.repeat(None) if twice is None else twice)
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    try:
        if twice is None or len(twice) == 2 * len(batch):
            return batch[:0]
    except (TypeError, KeyError, IndexError, NotImplementedError):
        pass
    raise _cannot_be_cut(f"a {type(batch).__name__}")


def _cannot_be_cut(what: str) -> SplitError:
    return SplitError(
        f"A rank has no sample in a short batch, and the batch has {what} in it, of which an empty "
        "batch can't be made. Let collate_fn return tensors whose first dimension is that of "
        "samples, or leave the last batch out with drop_last=True."
    )
