"""Samples of a run's tensors after a step: a step that is repeated is to give the same ones."""

from __future__ import annotations

import struct
import time
import zlib
from collections.abc import Callable

import torch

from lockstep.checkpoint import SnapshotPlan
from lockstep.comm import bytes_of
from lockstep.launcher import SnapshotMemory
from lockstep.torch_private import _foreach_copy_

_NUM_ELEMENTS = 5  # of a tensor
_BYTES = 128  # of each tensor's: so many complex128 numbers have room
_MOST_TENSORS = 1024
_PREFIX = struct.Struct("=8sIqq")  # magic bytes, a checksum of the rest, the step, and the length
_MAGIC = b"samples\n"


class Excerpts:
    """Some elements of each tensor of a plan, from all over the tensor.

    Args:
        plan: The plan.
        late: Whether only of what the steps of optimizers alone change.
    """

    def __init__(self, plan: SnapshotPlan, *, late: bool = False) -> None:
        self.plan = plan
        placed = (plan.late if late else plan.placed)[:_MOST_TENSORS]
        self._keys = [key for key, *_ in placed]
        self._sources = [
            each.elements[:: max(1, each.elements.numel() // (_NUM_ELEMENTS - 1))][:_NUM_ELEMENTS]
            for each in placed
        ]
        self._memory = torch.zeros(len(placed) * _BYTES, dtype=torch.uint8, device="cpu")
        self._targets = [
            self._memory[at : at + each.nbytes].view(each.dtype)
            for at, each in zip(range(0, len(self._memory), _BYTES), self._sources, strict=True)
        ]

    def take(self) -> bytes:
        """Return them."""
        if self._targets:
            with torch.no_grad():
                _foreach_copy_(self._targets, self._sources)
        return bytes(bytes_of(self._memory))

    def differing(self, found: bytes, expected: bytes) -> str | None:
        """Return the name of the first tensor whose samples differ, None if there is none."""
        if len(found) != len(expected):  # those of other tensors
            return None
        chunks = range(0, len(found), _BYTES)
        differ = (found[at : at + _BYTES] != expected[at : at + _BYTES] for at in chunks)
        return next((k for k, is_other in zip(self._keys, differ, strict=True) if is_other), None)


class RepeatedStep:
    """Compares a step that is repeated after a restart with what it gave before.

    Args:
        memory: The rank's slots. Samples of the next step stand behind a snapshot.

    Attributes:
        taken: The step, the slot and the end there of the snapshot that was taken last.
        seconds: The time that all this has taken.
    """

    def __init__(self, memory: SnapshotMemory) -> None:
        self._memory = memory
        self._excerpts: Excerpts | None = None
        self._expected: tuple[int, bytes] | None = None  # samples after a step
        self.taken: tuple[int, int, int] | None = None
        self.seconds = 0.0

    def expect(self, step: int, slot: int, end: int) -> None:
        """Expect the samples after ``step`` that are behind the ``end`` of a snapshot, if any."""
        samples = _read_record(self._memory.view(slot)[end:], step)
        self._expected = None if samples is None else (step, samples)

    def after(self, step: int, plan: Callable[[], SnapshotPlan]) -> str | None:
        """Take samples after the step that follows a snapshot, or compare them with those before.

        Returns:
            The name of a tensor that isn't as it was before a restart, if there is one.
        """
        follows = self.taken is not None and step == self.taken[0] + 1
        expected, is_repeated = self._expected, False
        if expected is not None and step >= expected[0]:
            self._expected, is_repeated = None, step == expected[0]
        if not follows and not is_repeated:
            return None
        start = time.perf_counter()
        current = plan()
        if self._excerpts is None or self._excerpts.plan is not current:
            self._excerpts = Excerpts(current)
        found = self._excerpts.take()
        if follows and self.taken is not None:
            _, slot, end = self.taken
            _write_record(self._memory.view(slot)[end:], step, found)
        self.seconds += time.perf_counter() - start
        if not is_repeated or expected is None:
            return None
        return self._excerpts.differing(found, expected[1])


def room_for(plan: SnapshotPlan) -> int:
    """Return how many bytes a record of a plan's samples takes."""
    return _PREFIX.size + min(len(plan.placed), _MOST_TENSORS) * _BYTES


def _write_record(memory: memoryview, step: int, samples: bytes) -> None:
    """Write samples after ``step`` steps to memory, if there is room."""
    record = _PREFIX.pack(_MAGIC, _checksum(step, samples), step, len(samples)) + samples
    if len(record) <= len(memory):
        memory[: len(record)] = record


def _read_record(memory: memoryview, step: int) -> bytes | None:
    """Return the samples after ``step`` steps that are in memory; None without any."""
    if len(memory) < _PREFIX.size:
        return None
    magic, checksum, found, length = _PREFIX.unpack_from(memory)
    if magic != _MAGIC or found != step or not 0 <= length <= len(memory) - _PREFIX.size:
        return None
    samples = bytes(memory[_PREFIX.size : _PREFIX.size + length])
    return samples if _checksum(step, samples) == checksum else None


def _checksum(step: int, samples: bytes) -> int:
    return zlib.crc32(samples, step & 0xFFFFFFFF)
