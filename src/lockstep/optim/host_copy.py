"""The one copy of flat parameters that the ranks of a host share."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any

import torch.distributed as dist

from lockstep.comm import bytes_of, named_barrier, one_copy

_NOTE_BYTES = 8


class BlockProgress(Enum):
    """How far the update of a rank's block is."""

    BEFORE = 0
    IN_THE_MIDST = 1
    DONE = 2


class HostCopy:
    """Memory of which the ranks of ``group`` have one copy, a block of each.

    Args:
        copy: The memory, and notes behind it.
        group: The ranks.
        num_bytes: The size of a block.

    Attributes:
        private: The memory as this rank sees it, with its own changes, as bytes.
        shared: The memory as all ranks see it.
    """

    def __init__(self, copy: Any, group: dist.ProcessGroup, num_bytes: int) -> None:
        self._copy, self._group = copy, group
        size, first = group.size() * num_bytes, group.rank() * num_bytes
        self._block = first, first + num_bytes
        self.private, self.shared = copy.private[:size], copy.shared[:size]
        # For each rank, twice the number of updates of its block; plus one during an update.
        self._notes = bytes_of(copy.shared[size:]).cast("q")
        self._num_updates = 0
        self._changed: Sequence[tuple[int, int]] = ()  # pages of this rank alone

    @classmethod
    def create(cls, group: dist.ProcessGroup, num_bytes: int) -> HostCopy | None:
        """Return a new one, if the system allows it. Every rank must call it; it blocks."""
        found = one_copy(group, group.size() * (num_bytes + _NOTE_BYTES))
        return None if found is None else cls(found, group, num_bytes)

    def begin_update(self) -> None:
        """Prepare for an update of this rank's block, from the values that this rank sees there.

        Every rank must call it; it blocks until no rank reads the earlier values any more.
        """
        named_barrier(self._group, "begin of an update")
        self._copy.is_updated = True
        self._notes[self._group.rank()] = 2 * self._num_updates + 1
        self._changed = self._copy.changed()
        first, last = self._block
        for start, stop in self._changed:
            both = slice(max(start, first), min(stop, last))
            if both.start < both.stop:
                self.shared[both] = self.private[both]

    def end_update(self) -> None:
        """Make the updated blocks of all ranks visible here. Every rank must call it; it blocks."""
        self._notes[self._group.rank()] = 2 * self._num_updates + 2
        named_barrier(self._group, "end of an update")
        self._copy.drop(self._changed)
        self._copy.is_updated = False
        self._num_updates += 1

    def progress(self) -> set[BlockProgress]:
        """Return how far the ranks are in an update that has failed on this rank."""
        return {BlockProgress(note - 2 * self._num_updates) for note in self._notes}
