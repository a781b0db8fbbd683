"""Buffers that the other ranks read after a barrier, and that are written again.

Note [Shared buffers]: a rank may want to write its buffer again while another rank still reads it.
So each rank writes a note behind its buffer when it won't read the others' any more. A rank that
doesn't find the notes of all ranks within _NOTES_SECONDS makes a second buffer, and takes turns
between the two. Two are enough, since a rank comes to a barrier only after its last read of the
buffers of the one before. On processors that may show the note to others before the reads are over,
there are two buffers from the start.
"""

from __future__ import annotations

import platform
import weakref

import torch

from lockstep.comm.buffers import exchange_buffers, zero_buffer
from lockstep.comm.group import SharedMemoryGroup
from lockstep.comm.shm.memory import bytes_of
from lockstep.deadline import Deadline
from lockstep.errors import CollectiveFailed

# The note: the number of the last barrier whose buffers this rank has read. It has a cache line.
_NOTE_BYTES, _LINE_BYTES = 8, 64
# How long to wait for the notes of the other ranks before a second buffer is made, and how long
# between two looks at them.
_NOTES_SECONDS, _PAUSE_SECONDS = 0.05, 50e-6
# Whether the processor completes earlier reads before others see a later write.
_KEEPS_ORDER = platform.machine() in ("x86_64", "AMD64")
# Of the ranks' buffers, the most whose notes are known.
_MOST_KNOWN = 8


class SharedBuffers:
    """The buffers of this rank, and those of the other ranks since the last barrier.

    For each barrier, call :meth:`next`, write the buffer, :meth:`start` and :meth:`wait`; then read
    :attr:`of_ranks`, and call :meth:`note_read`. Every rank must do the same.

    Args:
        group: A group whose ranks reach each other's memory.
        numel: The number of elements of a buffer, without what is behind them.
        dtype, device: Those of the elements.

    Attributes:
        local: The buffers of this rank, the one that is to be written first.
        of_ranks: The buffers at the last barrier, by rank. None if a rank lacks shared memory.
    """

    def __init__(
        self, group: SharedMemoryGroup, numel: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        # What is allocated.
        self._group, self._dtype, self._device = group, dtype, device
        self._numel = self.numel_with_note(numel, dtype)
        self._note_at = self._numel - _LINE_BYTES // dtype.itemsize
        self.local = [self.new()]
        # Other ranks may read the buffers for a while after these are gone.
        weakref.finalize(self, group.keep, self.local).atexit = False
        # The last barrier, if this rank has come to it since it last wrote: its buffer, and what
        # the group's num_exchanges was then. Whether the note of it is written.
        self._read_by_others: torch.Tensor | None = None
        self._passed_at, self._has_noted = 0, False
        self._number = 0  # of the barriers so far
        self.of_ranks: list[torch.Tensor] = []
        # The notes of all ranks then; and by the address of their buffers, with these.
        self._notes: list[memoryview] = []
        self._known: dict[int, tuple[memoryview, torch.Tensor]] = {}
        # The barrier that is to come: the buffer, and the group's generation.
        self._awaited: tuple[torch.Tensor, object] | None = None

    @staticmethod
    def numel_with_note(numel: int, dtype: torch.dtype) -> int:
        """Return the number of elements of a buffer: ``numel`` in whole lines, and one more."""
        line = _LINE_BYTES // dtype.itemsize
        return (-(-numel // line) + 1) * line

    def new(self) -> torch.Tensor:
        """Return zeros, with room for a note behind them."""
        return zero_buffer(self._group, self._numel, self._dtype, self._device)

    def next(self) -> torch.Tensor:
        """Return a buffer of this rank that no other rank reads any more, to be written."""
        self.note_read()
        if self._read_by_others is not None:
            self._read_by_others = None
            self._free_first()
        self.of_ranks = []
        return self.local[0]

    def _free_first(self) -> None:
        """Make the first buffer one that no rank reads. See Note [Shared buffers]."""
        if len(self.local) == 1:
            patience = Deadline(_NOTES_SECONDS)
            if _KEEPS_ORDER and patience.until(self._is_read_by_all, _PAUSE_SECONDS):
                return
            self.local.append(self.new())
        self.local.reverse()

    def _is_read_by_all(self) -> bool:
        return all(note[0] == self._number for note in self._notes)

    def start(self, buffer: torch.Tensor) -> None:
        """Say that ``buffer`` is written: :meth:`wait`, or :meth:`leave`, is to come."""
        self._awaited = buffer, self._group.generation

    @property
    def is_awaited(self) -> bool:
        """Whether a barrier is to come."""
        return self._awaited is not None

    def wait(self) -> None:
        """Wait until the buffers of all ranks are written; those are :attr:`of_ranks`."""
        assert self._awaited is not None
        buffer, _ = self._awaited
        try:
            self.of_ranks = exchange_buffers(self._group, buffer)
        except CollectiveFailed:
            self._awaited = None
            raise
        self._awaited = None
        self._pass(buffer)
        if len(self._known) > len(self.of_ranks) * _MOST_KNOWN:
            self._known = {}
        self._notes = [*map(self._note_behind, self.of_ranks)]

    def leave(self) -> None:
        """Let the other ranks pass the barrier, although an error keeps this one from it.

        Shown by test_an_error_before_the_barrier_of_a_backward_leaves_the_ranks_in_step. Not after
        a mismatch, after which no rank comes to it: see Note [Mismatches] in comm/work.py. Shown by
        test_a_mismatch_in_one_model_leaves_no_barrier_of_another_one_to_come.
        """
        awaited, self._awaited = self._awaited, None
        if awaited is not None and self._group.generation is awaited[1]:
            self._pass(awaited[0])
            self.note_read()
            self._group.start_exchange_of_buffers(awaited[0])

    def _pass(self, buffer: torch.Tensor) -> None:
        self._read_by_others, self._has_noted = buffer, False
        self._passed_at = self._group.num_exchanges
        self._number += 1

    def note_read(self) -> None:
        """Note for the other ranks that this one won't read their last buffers any more."""
        if self._read_by_others is not None and not self._has_noted:
            self._has_noted = True
            self._note_behind(self._read_by_others)[0] = self._number

    @property
    def are_kept_for_long(self) -> bool:
        """Whether other ranks that have dropped their buffers keep the memory for some barriers.

        They do so for the next NUM_KEPT ones.
        """
        age = self._group.num_exchanges - self._passed_at
        return self._read_by_others is None or age <= self._group.NUM_KEPT - 3

    def _note_behind(self, buffer: torch.Tensor) -> memoryview:
        address = buffer.data_ptr()
        if address not in self._known:
            note = bytes_of(buffer[self._note_at :])[:_NOTE_BYTES].cast("q")
            self._known[address] = note, buffer
        return self._known[address][0]
