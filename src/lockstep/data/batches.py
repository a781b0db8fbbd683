"""How a global batch is split over the ranks: as evenly as possible, the first ranks one more."""

from __future__ import annotations

from lockstep.arguments import as_whole_number
from lockstep.errors import SplitError


def batch_share(batch_size: int, rank: int, world_size: int) -> int:
    """How many samples of a global batch are this rank's.

    Args:
        batch_size: Samples in the global batch, over all ranks; at least ``world_size``.
        rank: This rank, from 0 to ``world_size - 1``.
        world_size: The number of ranks.

    Returns:
        ``batch_size / world_size``, rounded so that the ranks' shares add up to ``batch_size``
        and the first ranks have one more.

    Raises:
        SplitError: If a rank would go without, or there is no such rank.
        TypeError: If one is not a whole number.
    """
    share = batch_slice(batch_size, rank, world_size)
    return int(share.stop - share.start)


def batch_slice(batch_size: int, rank: int, world_size: int) -> slice:
    """Which samples of a global batch are this rank's: ``batch[batch_slice(...)]``.

    The slices of the ranks follow one another in the order of the ranks and cover the batch.

    Args:
        batch_size: Samples in the global batch, over all ranks; at least ``world_size``.
        rank: This rank, from 0 to ``world_size - 1``.
        world_size: The number of ranks.

    Returns:
        A slice of :func:`batch_share` samples.

    Raises:
        SplitError: If a rank would go without, or there is no such rank.
        TypeError: If one is not a whole number.
    """
    batch_size = as_whole_number("batch_size", batch_size)
    rank, world_size = as_whole_number("rank", rank), as_whole_number("world_size", world_size)
    if not 0 <= rank < world_size:
        raise SplitError(
            f"There is no rank {rank} in a world of {world_size}: "
            "ranks count from 0 to world_size - 1. Take both from lockstep.init()."
        )
    if batch_size < world_size:
        raise SplitError(
            f"A global batch of {batch_size} can't be split over a world size of {world_size}: "
            "each rank needs a sample at least. Use a larger batch or fewer ranks."
        )
    share, num_larger = divmod(batch_size, world_size)
    start = rank * share + min(rank, num_larger)
    return slice(start, start + share + (rank < num_larger))


def epoch_shares(num_samples: int, batch_size: int, world_size: int) -> list[int]:
    """How many samples each rank needs so that all take the same steps in an epoch.

    Parts that are merely even don't do: 129 samples in global batches of 128 over 2 ranks are
    parts of 65 and 64, and rank 0 alone would take a second step and wait in it for ever.
    Here every global batch, the short last one too, is split over all ranks.

    Args:
        num_samples: Samples in the dataset.
        batch_size: Samples in a global batch, over all ranks; at least ``world_size``.
        world_size: The number of ranks.

    Returns:
        One count per rank, for :func:`~lockstep.data.partition.partition`; together they are
        ``num_samples``. A loader of :func:`batch_share` samples at a time over each part
        then gives every rank equally many batches.

    Raises:
        SplitError: If a batch, or what is left for the last one, has fewer samples than there
            are ranks; or if there is no rank, or less than no sample.
        TypeError: If one is not a whole number.
    """
    num_samples = as_whole_number("num_samples", num_samples)
    batch_size = as_whole_number("batch_size", batch_size)
    world_size = as_whole_number("world_size", world_size)
    if num_samples < 0 or world_size < 1:
        raise SplitError(
            f"num_samples is {num_samples} and world_size is {world_size}, but a dataset has 0 "
            "samples or more, and there is one rank at least. Take the ranks from lockstep.init()."
        )
    num_full, last = divmod(num_samples, batch_size) if batch_size > 0 else (1, 0)
    if 0 < last < world_size:
        raise SplitError(
            f"{num_samples} samples in global batches of {batch_size} leave {last} for the last "
            f"batch, which can't be split over {world_size} ranks. Use another batch size, or "
            f"leave {last} of the samples out."
        )
    return [
        num_full * batch_share(batch_size, rank, world_size)
        + (batch_share(last, rank, world_size) if last else 0)
        for rank in range(world_size)
    ]
