"""Samples of a run's tensors after a step: a step that is repeated is to give the same ones."""

from __future__ import annotations

import struct
import zlib

import torch

from lockstep.checkpoint import SnapshotPlan
from lockstep.comm import bytes_of
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


def room_for(plan: SnapshotPlan) -> int:
    """Return how many bytes a record of a plan's samples takes."""
    return _PREFIX.size + min(len(plan.placed), _MOST_TENSORS) * _BYTES


def write_record(memory: memoryview, step: int, samples: bytes) -> None:
    """Write samples after ``step`` steps to memory, if there is room."""
    record = _PREFIX.pack(_MAGIC, _checksum(step, samples), step, len(samples)) + samples
    if len(record) <= len(memory):
        memory[: len(record)] = record


def read_record(memory: memoryview, step: int) -> bytes | None:
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
