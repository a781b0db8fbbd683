"""What a run keeps in the launcher's memory, for when its ranks are started again."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from lockstep.checkpoint import Ranks
from lockstep.comm import device_of_facts
from lockstep.launcher import SnapshotMemory
from lockstep.resume.checkpoints import Checkpoints
from lockstep.resume.copies import Copies
from lockstep.resume.newest import State, key_of, load_newest
from lockstep.resume.pace import Agreed, SnapshotPace
from lockstep.resume.snapshots import Snapshots
from lockstep.world import alike_failures_of, detect

_log = logging.getLogger("lockstep")


class InMemory:
    """Takes snapshots, and lets other hosts have copies, if the launcher has memory for them.

    Args:
        ranks: All ranks.
        things: What is in a snapshot, by name.
        path: The folder of the program's checkpoints, or "".
        number: How many loops the program has had before.
        descriptors: Those of the memory that the launcher has for this rank; there may be none.
        pace: Is told how long snapshots take.

    Attributes:
        next_step: After how many steps of the run the next snapshot is due.
        fails: Whether this rank has no room for snapshots.
    """

    def __init__(
        self,
        ranks: Ranks,
        things: Mapping[str, Any],
        path: str,
        number: int,
        descriptors: Sequence[int],
        pace: SnapshotPace,
    ) -> None:
        self._ranks, self._pace = ranks, pace
        self._snapshots: Snapshots | None = None
        self._copies: Copies | None = None
        self._copy_seconds = 0.0
        self.next_step = 1
        self.fails = False
        mine = descriptors[: SnapshotMemory.NUM_SLOTS]
        others = descriptors[SnapshotMemory.NUM_SLOTS :]
        memory = SnapshotMemory.inherited(mine) if mine else None
        if memory is None:
            return
        if not path and number and ranks.rank == 0:
            _log.warning(
                "steps() number %s of this program has no path, and memory has snapshots of "
                "one loop at a time: a restart repeats the earlier loops, and this one. Give "
                "each steps() a path of its own.",
                number + 1,
            )
        key = key_of(ranks, path, things, number)
        self._snapshots = Snapshots(memory, things, key, ranks.rank, path)
        self._copies = _copies(ranks, memory, others)

    @property
    def is_there(self) -> bool:
        """Whether snapshots are taken."""
        return self._snapshots is not None

    @property
    def is_torn(self) -> bool:
        """Whether the last snapshot was discarded, as it was changed while it was copied."""
        return self._snapshots is not None and self._snapshots.is_torn

    def entered(self) -> AbstractContextManager[Any]:
        """Return a context for a loop, in which snapshots are taken."""
        return nullcontext() if self._snapshots is None else self._snapshots

    def load_newest(self, checkpoints: Checkpoints | None) -> State | None:
        """Put all things into the newest state that there is. Every rank calls it; it blocks."""
        num_alike = alike_failures_of(os.environ)
        return load_newest(self._ranks, self._snapshots, self._copies, checkpoints, num_alike)

    def is_due(self, num_done: int) -> bool:
        """Whether a snapshot is due after so many steps."""
        return self._snapshots is not None and num_done >= self.next_step

    def differing(self, step: int) -> str | None:
        """Return the name of a tensor that isn't as it was after ``step`` before a restart."""
        return None if self._snapshots is None else self._snapshots.sample(step)

    def complete(self) -> None:
        """Complete the last snapshot, and let another host have it. Every rank calls it."""
        if self._snapshots is not None:
            self._try(self._snapshots.join)
            self._copy()

    def settle(self, agreed: Agreed) -> None:
        """Do what the last snapshot needs, if there was something wrong with it on any rank."""
        if self._snapshots is not None and agreed.fails:
            self._snapshots.discard()
            self._snapshots.close()
            self._snapshots = None
        elif self._snapshots is not None and agreed.is_torn:
            self._snapshots.retake()

    def take(self, step: int, state: State, *, copies: bool = True) -> None:
        """Take a snapshot after ``step`` steps; ``copies``: let another host have the newest whole.

        Every rank calls it; it blocks.
        """
        if self._snapshots is None:
            return
        taken = partial(self._snapshots.take, step, *state)
        self._try(lambda: self._pace.took_snapshot(taken() + self._copy_seconds))
        self._copy_seconds = 0.0
        if copies:
            self._copy()

    def _copy(self) -> None:
        if self._copies is not None:
            self._copy_seconds += self._copies.update()

    def _try(self, take: Callable[[], object]) -> None:
        """Take a snapshot, or complete it; if there is no room, all ranks are told at the next."""
        try:
            take()
        except OSError as error:
            _log.warning(
                "No snapshots are taken any more: %s. A restart goes on from the newest "
                "checkpoint. Training goes on.",
                error,
            )
            self.fails = True

    def close(self) -> None:
        """Leave the memory to the launcher."""
        if self._snapshots is not None:
            self._snapshots.close()
            if self._copies is not None:
                self._copies.close()


def _copies(ranks: Ranks, memory: SnapshotMemory, descriptors: Sequence[int]) -> Copies | None:
    """Return this rank's part in copies on other hosts, if the launcher has memory for some.

    There are none if the loop isn't over all ranks, or on a network without tensors of the CPU.
    """
    of_others = SnapshotMemory.inherited(descriptors) if descriptors else None
    place = detect(os.environ)
    if of_others is None or place.local_world_size is None or place.world_size != ranks.size:
        return None
    if device_of_facts(ranks.group).type != "cpu":
        return None
    return Copies(ranks, memory, of_others, place.local_world_size)
