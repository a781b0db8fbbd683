"""Memory that several processes see, without a name in any file system."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import torch

from lockstep.errors import SharedMemoryFull

# From <fcntl.h> and <linux/falloc.h>, where Python doesn't have them.
_F_ADD_SEALS, _F_SEAL_SEAL, _F_SEAL_SHRINK, _F_SEAL_GROW = 1033, 1, 2, 4
_FALLOC_FL_KEEP_SIZE, _FALLOC_FL_PUNCH_HOLE = 1, 2

# This part of the memory that there is may be taken within so many seconds of looking.
_SHARE = 16
_LOOK_SECONDS = 0.5


class Segment:
    """Memory that this process has made and that others can map, by its descriptor.

    It has no name, in ``/dev/shm`` or elsewhere: nothing is left of it when the last process
    that has it ends, however that ends, and how large ``/dev/shm`` is doesn't matter. Its pages
    are there from the start: running out of memory is an error here, and not a signal later.
    It can't be shrunk either, so no process can make another's access fail.

    Attributes:
        descriptor: What another process maps it by, or -1 when it was closed.
        pointer: Where it is in this process.
    """

    def __init__(self, descriptor: int, num_bytes: int, pointer: int) -> None:
        self.descriptor = descriptor
        self.pointer = pointer
        self._num_bytes = num_bytes

    @classmethod
    def create(
        cls, num_bytes: int, when_unused: Callable[[], None] | None = None
    ) -> tuple[Segment, torch.Tensor]:
        """Make a segment, and return it with the tensor of its bytes.

        Args:
            num_bytes: How much.
            when_unused: Called when no tensor of this process uses it any more.

        Raises:
            SharedMemoryFull: If there isn't enough memory.
        """
        num_bytes = max(num_bytes, 1)
        _room.take(num_bytes)
        descriptor = -1
        try:
            descriptor = os.memfd_create("lockstep", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(descriptor, num_bytes)
            os.posix_fallocate(descriptor, 0, num_bytes)
            seals = _F_SEAL_SEAL | _F_SEAL_SHRINK | _F_SEAL_GROW
            fcntl.fcntl(descriptor, _F_ADD_SEALS, seals)
            memory = mmap.mmap(descriptor, num_bytes)
        except (OSError, ValueError) as error:
            if descriptor >= 0:
                os.close(descriptor)
            raise _full(num_bytes, error) from error
        # The tensor has the view. What is called when that goes has the memory until it is done:
        # nothing else can be at this address before. Shown by
        # test_tensors_are_dropped_by_any_thread_while_others_are_made.
        view = memoryview(memory)
        if when_unused is not None:
            weakref.finalize(view, _call_with, when_unused, memory).atexit = False
        tensor = torch.frombuffer(view, dtype=torch.uint8)
        return cls(descriptor, num_bytes, tensor.data_ptr()), tensor

    def close(self) -> None:
        """Give up the descriptor; the memory stays as long as tensors or other processes use it."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def free(self) -> None:
        """Give the memory back although other processes may still map it, and close."""
        if self.descriptor >= 0:
            ctypes.CDLL(None).fallocate(
                self.descriptor,
                _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE,
                ctypes.c_long(0),
                ctypes.c_long(self._num_bytes),
            )
            self.close()


def _call_with(call: Callable[[], None], memory: mmap.mmap) -> None:
    call()


def map_segment(descriptor: int) -> torch.Tensor:
    """Map the segment of another process, and close ``descriptor``; return it as bytes.

    Raises:
        SharedMemoryFull: If this process may not have as much address space.
    """
    size = 0
    try:
        size = os.fstat(descriptor).st_size
        return torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)
    except OSError as error:
        raise _full(size, error) from error
    finally:
        os.close(descriptor)


def _full(num_bytes: int, error: Exception) -> SharedMemoryFull:
    return SharedMemoryFull(
        f"There is no room for {_in_words(num_bytes)} of shared memory: {error}. Use less of it, "
        "raise this process's limits, or use the backend 'gloo', which needs none."
    )


def check_room(num_bytes: int) -> int:
    """Return how much memory this process may still take.

    Raises:
        SharedMemoryFull: If that is less than ``num_bytes``.
    """
    room, limit = min(_room_by_limit(), key=lambda found: found[0])
    if num_bytes > room:
        error = OSError(errno.ENOMEM, f"{limit} leaves {_in_words(max(room, 0))}")
        raise _full(num_bytes, error)
    return room


class _Room:
    """How much memory there is to take, looked up anew when that may have changed.

    What would go beyond a limit is refused here: the kernel would kill a process instead.
    """

    def __init__(self) -> None:
        self._left = 0
        self._until = 0.0

    def take(self, num_bytes: int) -> None:
        # To look takes longer than to make a segment for a message. A part of what was found,
        # for a moment, may be taken without: others take as well.
        if num_bytes > self._left or time.monotonic() > self._until:
            room = check_room(num_bytes)
            self._left, self._until = room // _SHARE, time.monotonic() + _LOOK_SECONDS
        self._left -= num_bytes


_room = _Room()


def _room_by_limit() -> list[tuple[int, str]]:
    """How many bytes each limit on this process leaves, and what to call it."""
    found = [(_available_memory(), "the memory of this machine")]
    for line in _lines("/proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2
            root, limit, usage = "/sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            root, limit = "/sys/fs/cgroup/memory", "memory.limit_in_bytes"
            usage = "memory.usage_in_bytes"
        else:
            continue
        # The limits of the groups above it hold as well. Inside a container the path may be that
        # of the host, and its own group is at the root.
        own = Path(root, path.lstrip("/"))
        for folder in (own, *(each for each in own.parents if each.is_relative_to(root))):
            most, used = _number(folder / limit), _number(folder / usage)
            if most is None or used is None:
                continue
            # File pages that nobody has used lately count, and go when room is needed.
            stat = dict(pair.split()[:2] for pair in _lines(folder / "memory.stat"))
            idle = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
            found.append((most - used + idle, f"the memory limit of its control group {path!r}"))
    return found


def _available_memory() -> int:
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 2**63


def _number(path: Path) -> int | None:
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].isdigit() else None


def _lines(path: str | Path) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def _in_words(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"
