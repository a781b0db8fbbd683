"""Whether an iterable dataset divides its samples among the ranks itself.

There are two habits. A dataset that knows torch's workers alone gives each worker its share of the
samples: such a one is shown the workers of all ranks. One that knows its rank too (by webdataset's
``split_by_node``, or as it was made for a rank) gives each worker its share of the rank's share:
shown the workers of all ranks it would leave samples out, so it is shown those of its own rank.

Which of them it is can be told by trying. Shown its own rank's workers, with the same seed on each
rank, a dataset of the first kind gives all ranks the same samples. It is tried only where there is
a reason: if the dataset asks for its rank when it begins, or has other values on each rank.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from types import FrameType
from typing import Any, NamedTuple

import torch.distributed as dist

from lockstep.errors import SplitError

# How many samples are compared.
NUM_PROBED = 4
_ASKING = {dist.get_rank.__code__, dist.get_world_size.__code__}
_READING_ENVIRONMENT = type(os.environ).__getitem__.__code__
_VARIABLES = {
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"),
    *("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "PMI_RANK", "PMI_SIZE"),
    *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
}


class View(IntEnum):
    """Which workers ``get_worker_info()`` counts while a dataset is read."""

    ALL = 0  # those of all ranks
    LOCAL = 1  # those of this rank: the dataset divides itself among the ranks
    PROBE = 2  # the same, to find out


class WorkerShard(NamedTuple):
    """What is known of a worker's shard."""

    first: int | None = None  # a checksum of its first sample, or samples; None if there is none
    asked_rank: bool = False  # whether the dataset asked for its rank when it began
    is_repeatable: bool = True  # whether it gives the same samples if it begins again
    is_same: bool = True  # whether all ranks have the same dataset, as far as that is known
    has_failed: bool = False  # whether it raised an error when it began, in a view on trial


# By whether the dataset divides itself among the ranks, and whether two shards are of one rank.
_TO_ALL = (
    "In its __iter__(), give only samples whose number modulo get_worker_info().num_workers is "
    "get_worker_info().id, which here count the workers of all ranks."
)
_CURES = {
    (False, False): _TO_ALL,
    (False, True): _TO_ALL,
    (True, False): "Divide them among the ranks, or leave out self_sharding=True.",
    (True, True): "It divides them among the ranks, but not among the workers of a rank. In its "
    "__iter__(), give only the samples of this rank whose number modulo "
    "get_worker_info().num_workers is get_worker_info().id; or use one worker.",
}


@contextmanager
def noting_rank() -> Iterator[list[bool]]:
    """Note whether this thread's program asks for its rank, or for the number of ranks."""
    asked: list[bool] = []
    before = sys.getprofile()

    def note(frame: FrameType, event: str, called: Any) -> None:
        if event == "call":
            code = frame.f_code
            is_variable = code is _READING_ENVIRONMENT and frame.f_locals.get("key") in _VARIABLES
            if code in _ASKING or is_variable:
                asked.append(True)
        elif event == "c_call" and getattr(called, "__name__", "") in ("rank", "size"):
            asked.extend([True] * isinstance(called.__self__, dist.ProcessGroup))

    sys.setprofile(note)
    try:
        yield asked
    finally:
        sys.setprofile(before)


def has_rank(shards: Sequence[Sequence[WorkerShard]]) -> bool:
    """Whether the dataset may know its rank, on several ranks; ``shards`` are by rank."""
    each = [shard for of_rank in shards for shard in of_rank]
    return len(shards) > 1 and any(s.asked_rank or not s.is_same for s in each)


def settle(probed: Sequence[Sequence[WorkerShard]]) -> View:
    """Return the view in which the dataset gives each sample once.

    Raises:
        SplitError: If that can't be told.
    """
    firsts = [[shard.first for shard in of_rank] for of_rank in probed]
    if all(of_rank == firsts[0] for of_rank in firsts):
        return View.ALL
    if all(shard.is_repeatable for of_rank in probed for shard in of_rank):
        return View.LOCAL
    raise SplitError(
        "The iterable dataset asks for its rank or differs between the ranks, and gives other "
        "samples each time it begins, so that it can't be told whether it divides its samples "
        "among the ranks itself. Say it: DataLoader(..., self_sharding=True) if on each rank it "
        "gives that rank's samples alone, and False if it divides them among the workers that "
        "get_worker_info() counts."
    )


def check_shards(shards: Sequence[Sequence[WorkerShard]], view: View) -> None:
    """Compare the shards' first samples, over all ranks.

    Raises:
        SplitError: If two shards begin with the same one.
    """
    owners: dict[int, tuple[int, str]] = {}
    for rank, theirs in enumerate(shards):
        for index, shard in enumerate(theirs):
            name = f"worker {index} of rank {rank}" if len(theirs) > 1 else f"rank {rank}"
            if shard.first is None:
                continue
            other, named = owners.setdefault(shard.first, (rank, name))
            if named == name:
                continue
            cure = _CURES[view is View.LOCAL, rank == other]
            raise SplitError(
                f"The iterable dataset gives the same samples to {named} and to {name}, so that "
                f"they would count several times. {cure}"
            )
