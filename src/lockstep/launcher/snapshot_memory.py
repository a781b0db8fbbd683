"""Snapshots of one rank's state in memory that the launcher holds, so that they outlive the rank.

Each rank has two files in memory, its slots, which it writes in turns. A slot has a header, the
bytes of the tensors, and two texts: the places of the tensors, and all other values. The header is
written last and has a checksum of its own: a slot that a rank was killed in writing isn't whole.
Headers are read without mapping the rest, and without torch.

With several hosts each rank has two more, for copies of the snapshots of a rank of another host.
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from lockstep.memory_files import memory_file, name_of

# Where the tensors begin: a page, so that each is aligned.
HEADER_BYTES = 4096
_MAGIC = b"lockstep snap 1\n"
_PREFIX = struct.Struct("=16sI")  # the magic bytes, and CRC-32 of the fields and the path
_FIELDS = struct.Struct("=qqqqqQI32sH")
_NAME = "lockstep-snapshot"
_MAX_PATH_BYTES = HEADER_BYTES - _PREFIX.size - _FIELDS.size


class SnapshotHeader(NamedTuple):
    """What a whole snapshot is.

    Attributes:
        step: How many steps are in it: the number of the step that follows.
        rank: The rank whose state it is.
        tensor_bytes: The size of the tensors.
        places_bytes: The size of the text that says where each tensor is.
        value_bytes: The size of the text with all other values.
        tensor_checksum: Of the tensors, as the writer computes it.
        text_checksum: CRC-32 of both texts.
        key: A digest of the program and its arguments, 32 bytes: of another one it is of no use.
        path: The folder of the program's checkpoints, "" if there is none.
    """

    step: int
    rank: int
    tensor_bytes: int
    places_bytes: int
    value_bytes: int
    tensor_checksum: int
    text_checksum: int
    key: bytes
    path: str

    @property
    def num_bytes(self) -> int:
        """The size of all that follows the header."""
        return self.tensor_bytes + self.places_bytes + self.value_bytes


class SnapshotMemory:
    """The two slots of one rank.

    The rank writes to a slot only while the other one is whole on every rank, so that at any moment
    all ranks have one snapshot of the same step: see :func:`newest_step`.

    Args:
        descriptors: Those of the two files; they stay the caller's to close.
    """

    NUM_SLOTS, PAGE_BYTES = 2, HEADER_BYTES

    def __init__(self, descriptors: Sequence[int]) -> None:
        if len(descriptors) != self.NUM_SLOTS:
            raise ValueError(f"A rank has {self.NUM_SLOTS} slots; given are {len(descriptors)}.")
        self._descriptors = tuple(descriptors)
        self._maps: list[mmap.mmap | None] = [None] * self.NUM_SLOTS

    @staticmethod
    def create(local_rank: int, *, of_copies: bool = False) -> tuple[int, int]:
        """Make two empty files, which no other user can open; return their descriptors.

        Args:
            local_rank: The rank whose they are.
            of_copies: Whether they are for copies of another rank's snapshots.

        Raises:
            OSError: If there is no room for them.
        """
        name = f"{_NAME}-{'copy-' * of_copies}{local_rank}"
        first = memory_file(f"{name}-0")
        try:
            return first, memory_file(f"{name}-1")
        except OSError:
            os.close(first)
            raise

    @classmethod
    def inherited(cls, descriptors: Sequence[int]) -> SnapshotMemory | None:
        """Return the slots that a launcher handed to this process; None if they aren't open here.

        A process that a rank starts has the rank's environment, but not its files.
        """
        for descriptor in descriptors:
            try:
                if not name_of(f"/proc/self/fd/{descriptor}").startswith(_NAME):
                    return None
            except OSError:
                return None
        return cls(descriptors)

    def header(self, slot: int) -> SnapshotHeader | None:
        """Return the header of a slot, if it is whole."""
        header = self.header_in(self.page(slot))
        if header is None:
            return None
        size = os.fstat(self._descriptors[slot]).st_size
        return header if HEADER_BYTES + header.num_bytes <= size else None

    @staticmethod
    def header_in(page: bytes) -> SnapshotHeader | None:
        """Return the header that a page is of, if it is whole."""
        if len(page) < HEADER_BYTES:
            return None
        magic, checksum = _PREFIX.unpack_from(page)
        fields = _FIELDS.unpack_from(page, _PREFIX.size)
        path_bytes = fields[-1]
        start = _PREFIX.size + _FIELDS.size
        stop = start + path_bytes
        if magic != _MAGIC or zlib.crc32(page[_PREFIX.size : stop]) != checksum:
            return None
        return SnapshotHeader._make((*fields[:-1], os.fsdecode(page[start:stop])))

    def page(self, slot: int) -> bytes:
        """Return the bytes of a slot's header, which is whole: for a copy of the slot."""
        return os.pread(self._descriptors[slot], HEADER_BYTES, 0)

    def put_page(self, slot: int, page: bytes) -> None:
        """Write the bytes of a header, when all else of the copy is written."""
        os.pwrite(self._descriptors[slot], page, 0)

    def headers(self) -> dict[int, SnapshotHeader]:
        """Return the headers of the slots that are whole, by slot."""
        found = {slot: self.header(slot) for slot in range(self.NUM_SLOTS)}
        return {slot: header for slot, header in found.items() if header is not None}

    def newest(self) -> SnapshotHeader | None:
        """Return the header of the newest snapshot of this rank, if there is one.

        Other ranks may not have it yet: :func:`newest_step` tells what all have.
        """
        return max(self.headers().values(), key=lambda header: header.step, default=None)

    def of_step(self, step: int) -> tuple[int, SnapshotHeader]:
        """Return the slot with the snapshot of ``step``, which there is, and its header."""
        return next((slot, each) for slot, each in self.headers().items() if each.step == step)

    def discard(self, slot: int) -> None:
        """Let a slot be whole no more, before it is written or because it is of no use."""
        if os.fstat(self._descriptors[slot]).st_size:
            os.pwrite(self._descriptors[slot], bytes(_PREFIX.size), 0)

    def clear(self) -> None:
        """Give the memory of both slots back, which no rank has mapped."""
        for descriptor in self._descriptors:
            os.ftruncate(descriptor, 0)

    def capacity(self, slot: int) -> int:
        """Return how many bytes a slot has already behind its header."""
        return max(0, os.fstat(self._descriptors[slot]).st_size - HEADER_BYTES)

    def room(self, slot: int, num_bytes: int) -> memoryview:
        """Return the memory of a slot behind its header, at least so large, to be written.

        It is the same at each call, until more is needed. Whoever asks for much looks first whether
        the machine has so much: the system would rather end processes than refuse it.

        Raises:
            OSError: If the system refuses it.
        """
        descriptor, needed = self._descriptors[slot], HEADER_BYTES + num_bytes
        if os.fstat(descriptor).st_size < needed:
            # Pages are taken here: without this, a write would end the process if there are none.
            os.posix_fallocate(descriptor, 0, needed)
        return self.view(slot)

    def view(self, slot: int) -> memoryview:
        """Return the memory of a slot behind its header."""
        size = os.fstat(self._descriptors[slot]).st_size
        mapped = self._maps[slot]
        if mapped is None or len(mapped) < size:
            # One that is too small stays mapped as long as tensors are views of it.
            mapped = self._maps[slot] = mmap.mmap(self._descriptors[slot], size)
        return memoryview(mapped)[HEADER_BYTES:]

    def close(self) -> None:
        """Unmap the slots, once nothing is a view of them any more; the files stay open."""
        self._maps = [None] * self.NUM_SLOTS

    def texts(self, slot: int, header: SnapshotHeader) -> tuple[bytes, bytes] | None:
        """Return the two texts of a slot; None if they aren't as they were written."""
        start = HEADER_BYTES + header.tensor_bytes
        text = os.pread(self._descriptors[slot], header.places_bytes + header.value_bytes, start)
        is_whole = len(text) == header.places_bytes + header.value_bytes
        if not is_whole or zlib.crc32(text) != header.text_checksum:
            return None
        return text[: header.places_bytes], text[header.places_bytes :]

    def complete(self, slot: int, header: SnapshotHeader) -> None:
        """Write the header, when all else of the slot is written: it is whole from now on."""
        path = os.fsencode(header.path)
        path = path if len(path) <= _MAX_PATH_BYTES else b""
        body = _FIELDS.pack(*header[:-1], len(path)) + path
        page = _PREFIX.pack(_MAGIC, zlib.crc32(body)) + body
        os.pwrite(self._descriptors[slot], page.ljust(HEADER_BYTES, b"\0"), 0)


def newest_step(memories: Iterable[SnapshotMemory]) -> int | None:
    """Return the newest step of which all of these ranks have a whole snapshot."""
    steps = [{header.step for header in memory.headers().values()} for memory in memories]
    return max(set.intersection(*steps), default=None) if steps else None
