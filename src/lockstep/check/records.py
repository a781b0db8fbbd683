"""What a checked run writes down, in files of a folder of its own, and what is read of it.

A run is ``"rank-0"`` and so on of the parallel run, or one of the runs in one process. No file is
read that was not written by the same check.
"""

from __future__ import annotations

import hashlib
import io
import os
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lockstep.deadline import Deadline
from lockstep.errors import LockstepError

ALONE = "alone"  # one process on the global batches
ROUNDED = "rounded"  # the same with a rounding error of its own added in each step


_POLL_SECONDS = 0.001


def of_rank(rank: int) -> str:
    """The run of ``rank``."""
    return f"rank-{rank}"


class CheckPlan(NamedTuple):
    """What is to be watched of a run, and what is to be changed in it."""

    folder: str
    num_steps: int
    float64: bool
    num_ranks: int  # of the parallel run
    run: str | None = None  # None: as a rank of the parallel run
    divides_itself: bool = False  # whether the program gives each rank its part of global batches
    # The suspects that are switched off, and the folder in ``folder`` for the records of that.
    suspects: tuple[str, ...] = ()
    trial: str = ""
    patience: float = 20.0  # the seconds after which a trial has failed

    def records(self, run: str, trial: str = "") -> Records:
        """The files of ``run``: of the program as it is, or of a trial."""
        return Records(str(Path(self.folder, trial)), run)


class Backward(NamedTuple):
    """A call of ``backward()``."""

    loss: float
    num_rows: int  # in the first tensor that a module has got since the last one
    rows: int  # the sum of the hashes of its rows, in any order
    divisor: float = 1.0  # by which the program divides the result of lockstep.mean()


@dataclass
class Step:
    """A step of an optimizer, after which tensors by name were written down."""

    tensors: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor]
    start: dict[str, torch.Tensor]  # the tensors when the first optimizer was made
    trained: list[str]  # the tensors that the optimizer changes
    parallel: list[str]  # those of them that a parallel model has
    backwards: list[Backward]  # since the last step
    options: dict[str, float]  # learning rate and others of the optimizer
    changed: list[str]  # parameters whose value isn't what the last step left
    inputs: int  # a checksum of all that modules were given
    draws: bool  # whether random numbers were drawn since the last batch or step
    accumulates: bool  # whether micro-batches were accumulated
    eps: float  # the relative rounding error of what it computed with
    in_shards: bool = False  # whether all backwards were in loops over shards


@dataclass
class BatchRecord:
    """What is known of a batch that a loader gave, whose value has a file of its own."""

    rows: list[int]  # the hash of each sample
    pads: bool  # whether the loader's sampler gives samples twice, to have equally many per rank
    is_empty: bool  # whether there is no sample in it
    is_ours: bool  # whether a lockstep.DataLoader gave it, which gives each sample once
    random_state: Any  # of all generators, right after
    content: str  # a checksum; empty if it has something unknown in it
    num_backwards: int  # how many the program had run before


@dataclass
class CollatedSamples:
    """What a loader's ``collate_fn`` made a batch of."""

    written: bytes  # by torch.save(), before it could change them
    draws: bool  # whether it drew random numbers for that

    def samples(self) -> list[Any]:
        """The samples, anew in each call."""
        return list(torch.load(io.BytesIO(self.written), weights_only=False))


@dataclass
class End:
    """How a run ended."""

    num_steps: int = 0
    notes: list[str] = field(default_factory=list)
    joins: bool = False  # whether ranks may take different numbers of steps
    # An optimizer with other weights for evaluations (Schedule-Free) that wasn't told of one.
    not_evaluating: str = ""


class Records:
    """The files of one run."""

    def __init__(self, folder: str, run: str) -> None:
        self._folder = Path(folder, run)
        self._folder.mkdir(parents=True, exist_ok=True)

    def save(self, name: str, value: object) -> None:
        """Write ``value`` under ``name``, by a rename: other processes may read it meanwhile."""
        descriptor, unfinished = tempfile.mkstemp(prefix="unfinished-", dir=self._folder)
        with os.fdopen(descriptor, "wb") as file:
            torch.save(value, file)
        Path(unfinished).rename(self._folder / name)

    def load(self, name: str) -> Any:
        """What was written under ``name``; None if nothing was."""
        path = self._folder / name
        # A batch may be of any class. The folder is open to this user alone.
        return torch.load(path, weights_only=False) if path.exists() else None

    def has(self, name: str) -> bool:
        """Whether anything was written under ``name``."""
        return (self._folder / name).exists()

    def step(self, number: int) -> Step | None:
        """The step ``number``, from 1, if there is one."""
        found: Step | None = self.load(f"step-{number}")
        return found

    def evaluation(self, number: int) -> dict[str, torch.Tensor] | None:
        """The tensors with which the program evaluates or saves after that step, if it does."""
        found: dict[str, torch.Tensor] | None = self.load(f"evaluation-{number}")
        return found

    def passes(self) -> dict[str, list[BatchRecord]]:
        """The batches of each pass over a loader."""
        found: dict[str, list[BatchRecord]] = {}
        paths = self._folder.glob("batch-*-*-*")
        for path in sorted(paths, key=lambda path: [*map(int, path.name.split("-")[1:])]):
            if (batch := self.load(path.name)) is not None:
                found.setdefault(path.name.rpartition("-")[0], []).append(batch)
        return found

    def end(self) -> End | None:
        """How the run ended; None if it has not."""
        found: End | None = self.load("end")
        return found


class Exchange:
    """What a rank tells the others in a trial, and what they have told.

    Each value has a key, and those of one key are told apart by their number.
    """

    def __init__(self, plan: CheckPlan, rank: int) -> None:
        self._ranks = [plan.records(of_rank(n), plan.trial) for n in range(plan.num_ranks)]
        self._local = self._ranks[rank]
        # Before the whole trial has failed: there is an error that says where.
        self._patience = plan.patience / 2
        self._counts: Counter[str] = Counter()
        self.rank = rank

    def gather(self, key: str, value: Any) -> list[Any]:
        """The ``value`` of each rank. Every rank calls it."""
        name = self._next(key)
        self._local.save(name, value)
        return [self._wait(rank, name) for rank in range(len(self._ranks))]

    def of_first(self, key: str, value: Any) -> Any:
        """The ``value`` of rank 0, which waits for nobody."""
        name = self._next(key)
        if self.rank == 0:
            self._local.save(name, value)
            return value
        return self._wait(0, name)

    def told(self, key: str) -> list[Any]:
        """What the ranks have told before, in a run that is over."""
        name = self._next(key)
        return [records.load(name) for records in self._ranks]

    def tell(self, key: str, value: Any) -> None:
        """Tell ``value``, for :meth:`told`."""
        self._local.save(self._next(key), value)

    def _next(self, key: str) -> str:
        self._counts[key] += 1
        return (
            f"told-{hashlib.blake2b(key.encode(), digest_size=8).hexdigest()}-{self._counts[key]}"
        )

    def _wait(self, rank: int, name: str) -> Any:
        records = self._ranks[rank]
        if not Deadline(self._patience).until(partial(records.has, name), _POLL_SECONDS):
            raise LockstepError(f"Rank {rank} takes another way through the program.")
        return records.load(name)
