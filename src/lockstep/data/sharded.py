"""The shards of global batches that a rank reads, for :func:`lockstep.shards`."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset

from lockstep.arguments import as_whole_number
from lockstep.data.batches import LocalBatch, local_batch
from lockstep.errors import SplitError
from lockstep.generators import mixed
from lockstep.same_bits import ShardedBatch, bounds_of, check_num_shards, shards_of, use_threads


def check_shards(loader: Any, num_shards: int | None, num_ranks: int, *, has_shares: bool) -> None:
    """Raise SplitError, or TypeError or ValueError, if batches of ``loader`` can't be cut so.

    ``has_shares`` is whether ranks get parts of different sizes.
    """
    if num_shards is None:
        return
    num_shards = as_whole_number("shards", num_shards, "a number of shards", at_least=1)
    check_num_shards(num_shards, num_ranks)
    if isinstance(loader.dataset, IterableDataset):
        raise SplitError(
            "shards= needs a dataset that can be indexed: which samples of an iterable one are in "
            "which shard depends on the number of ranks. Give its samples an index."
        )
    if has_shares:
        raise SplitError(
            "shards= and shares= exclude each other: shards of a batch are of one size, whichever "
            "rank computes them. Leave shares out."
        )
    if loader.batch_size is not None and loader.batch_size < num_shards:
        raise SplitError(
            f"A global batch of {loader.batch_size} can't be cut into {num_shards} shards. Use a "
            "larger batch or fewer shards."
        )


class ShardedIteration:
    """One iteration over a loader's batches, in shards.

    Args:
        num_shards: The number of shards of each global batch.
        rank, num_ranks: This rank, and the number of ranks.
        seed: The loader's.
        epoch: The epoch.
    """

    def __init__(self, num_shards: int, rank: int, num_ranks: int, seed: int, epoch: int) -> None:
        self._num_shards, self._mine = num_shards, shards_of(rank, num_ranks, num_shards)
        self._seed, self._epoch = seed, epoch
        # Of each batch that is asked for, its number and those of this rank's shards with samples.
        self._asked: deque[tuple[int, list[int]]] = deque()

    def parts(self, batch: Any, number: int, position: int) -> list[LocalBatch]:
        """Return what is read of a global batch, for each shard of this rank that has samples.

        If none has, it is an empty batch, which :meth:`batches` leaves out.
        """
        bounds, seed = bounds_of(len(batch), self._num_shards), mixed(self._seed, self._epoch)
        numbers = [each for each in self._mine if bounds[each] < bounds[each + 1]]
        self._asked.append((number, numbers))
        pairs = [(bounds[each], bounds[each + 1]) for each in numbers] or [(0, 0)]
        return [local_batch(batch, start, stop, seed, position) for start, stop in pairs]

    def batches(self, stream: Iterator[Any]) -> Iterator[ShardedBatch]:
        """Yield the shards of each global batch together, which come in ``stream``."""
        for first in stream:
            number, numbers = self._asked.popleft()
            batches = [first, *(next(stream) for _ in numbers[1:])][: len(numbers)]
            place = self._epoch, number
            yield ShardedBatch(batches, numbers, self._num_shards, seed=self._seed, place=place)


def sharding_of(
    num_shards: int | None, rank: int, num_ranks: int, seed: int, epoch: int
) -> ShardedIteration | None:
    """Return what an iteration over batches in shards needs; None if these have none."""
    if num_shards is None:
        return None
    use_threads()
    return ShardedIteration(num_shards, rank, num_ranks, seed, epoch)


def grouped(stream: Iterator[Any], sharding: ShardedIteration | None) -> Iterator[Any]:
    """Return batches, of the shards in ``stream`` if it has some."""
    return stream if sharding is None else sharding.batches(stream)
