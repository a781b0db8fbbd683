"""Memory that several processes see, without a name in any file system."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import resource
import weakref
from collections.abc import Callable
from ctypes import c_int, c_size_t, c_void_p
from pathlib import Path

import torch

from lockstep.comm.failures import Deadline
from lockstep.errors import SharedMemoryFull

# From <fcntl.h>, where Python doesn't have them.
_F_ADD_SEALS, _F_SEAL_SEAL, _F_SEAL_SHRINK, _F_SEAL_GROW = 1033, 1, 2, 4
# From <sys/mman.h>, <fcntl.h> and Python's <memoryobject.h>.
_MAP_FAILED = c_void_p(-1).value
_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_WRITABLE = 0x200

# For how long after a look at the limits which part of the room may be taken without another look.
_PART = 16
_LOOK_SECONDS = 0.5

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = c_void_p
_libc.mmap.argtypes = (c_void_p, c_size_t, c_int, c_int, c_int, ctypes.c_long)
_libc.munmap.argtypes = (c_void_p, c_size_t)
_libc.madvise.argtypes = (c_void_p, c_size_t, c_int)
_libc.fallocate.argtypes = (c_int, c_int, ctypes.c_long, ctypes.c_long)
_view_prototype = ctypes.PYFUNCTYPE(ctypes.py_object, c_void_p, ctypes.c_ssize_t, c_int)
_memoryview_of = _view_prototype(("PyMemoryView_FromMemory", ctypes.pythonapi))


class Segment:
    """Memory that this process has made, and that others can map by its descriptor.

    It has no name, in ``/dev/shm`` or elsewhere: the kernel frees it with the last process that
    maps it, and the size of ``/dev/shm`` doesn't matter. Its pages exist from the start: a lack of
    memory is an error here, and not a signal later. It can't be shrunk, so no process can make
    another's access fail.

    Attributes:
        descriptor: The file descriptor, or -1 after :meth:`close`.
        pointer: Its address in this process.
    """

    def __init__(self, descriptor: int, num_bytes: int, pointer: int) -> None:
        self.descriptor = descriptor
        self.pointer = pointer
        self._num_bytes = num_bytes

    @classmethod
    def create(
        cls, num_bytes: int, when_unused: Callable[[], None] | None = None
    ) -> tuple[Segment, torch.Tensor]:
        """Return a new segment of ``num_bytes``, and its bytes as a tensor.

        ``when_unused`` is called when no tensor of this process uses it any more.

        Raises:
            SharedMemoryFull: If there isn't enough memory.
        """
        num_bytes = max(num_bytes, 1)
        take_room(num_bytes)
        descriptor = -1
        try:
            descriptor = os.memfd_create("lockstep", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(descriptor, num_bytes)
            os.posix_fallocate(descriptor, 0, num_bytes)
            seals = _F_SEAL_SEAL | _F_SEAL_SHRINK | _F_SEAL_GROW
            fcntl.fcntl(descriptor, _F_ADD_SEALS, seals)
            tensor = _map(descriptor, num_bytes, when_unused)
        except OSError as error:
            if descriptor >= 0:
                os.close(descriptor)
            raise no_room(num_bytes, error) from error
        return cls(descriptor, num_bytes, tensor.data_ptr()), tensor

    def close(self) -> None:
        """Close the descriptor; the memory stays as long as tensors or other processes use it."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def free(self) -> None:
        """Give the memory back although other processes may map it, and close.

        Only until ``when_unused`` returns, while this process maps it itself.
        """
        _libc.madvise(self.pointer, self._num_bytes, mmap.MADV_REMOVE)
        self.close()


def _map(
    descriptor: int, num_bytes: int, when_unused: Callable[[], None] | None = None
) -> torch.Tensor:
    # Not by mmap.mmap, which keeps a copy of the descriptor, of which a process may have a thousand
    # by default. Shown by test_memory_that_all_ranks_have_mapped_takes_no_descriptor.
    access = mmap.PROT_READ | mmap.PROT_WRITE
    pointer = _libc.mmap(None, num_bytes, access, mmap.MAP_SHARED, descriptor, 0)
    if pointer == _MAP_FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    # The tensor owns the view. After its end the memory stays mapped until ``when_unused`` returns,
    # so nothing else is at this address before. Shown by
    # test_tensors_are_dropped_by_any_thread_while_others_are_made.
    view = _memoryview_of(pointer, num_bytes, _WRITABLE)
    weakref.finalize(view, _unmap, pointer, num_bytes, when_unused).atexit = False
    return torch.frombuffer(view, dtype=torch.uint8)


def _unmap(pointer: int, num_bytes: int, when_unused: Callable[[], None] | None) -> None:
    try:
        if when_unused is not None:
            when_unused()
    finally:
        _libc.munmap(pointer, num_bytes)


def map_segment(descriptor: int) -> torch.Tensor:
    """Map the segment of another process, close ``descriptor``, and return the bytes.

    Raises:
        SharedMemoryFull: If this process may not have that much address space.
    """
    size = 0
    try:
        size = os.fstat(descriptor).st_size
        return _map(descriptor, size)
    except OSError as error:
        raise no_room(size, error) from error
    finally:
        os.close(descriptor)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous ``tensor`` on the CPU, which must be kept meanwhile."""
    pointer, num_bytes = tensor.data_ptr(), tensor.nbytes
    view: memoryview = (
        _memoryview_of(pointer, num_bytes, _WRITABLE) if num_bytes else memoryview(b"")
    )
    return view


def release(descriptor: int, start: int, num_bytes: int) -> None:
    """Give back the memory of a part of a file in memory, whose size stays."""
    _libc.fallocate(descriptor, _KEEP_SIZE | _PUNCH_HOLE, start, num_bytes)


def no_room(num_bytes: int, error: OSError) -> SharedMemoryFull:
    """Return the error to raise when ``error`` keeps this process from taking memory."""
    what = f"{_in_words(num_bytes)} of shared memory"
    if error.errno in (errno.EMFILE, errno.ENFILE):
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return SharedMemoryFull(
            f"There is no file descriptor left for {what}: {error}. This process may have {limit} "
            "open; raise that limit (ulimit -n), or close what it doesn't need."
        )
    return SharedMemoryFull(
        f"There is no room for {what}: {error}. Use less of it, raise this process's limits, or "
        "use the backend 'gloo', which needs none."
    )


def check_room(num_bytes: int) -> int:
    """Return how much memory this process may still take.

    Raises:
        SharedMemoryFull: If that is less than ``num_bytes``.
    """
    room, limit = min(_room_by_limit(), key=lambda found: found[0])
    if num_bytes > room:
        error = OSError(errno.ENOMEM, f"{limit} leaves {_in_words(max(room, 0))}")
        raise no_room(num_bytes, error)
    return room


class _Room:
    """The memory that may be taken without another look at the limits.

    A look takes longer than making a segment, so a part of the room found may be taken without
    another for a while; only a part, as other processes take memory too.
    """

    left = 0
    expiry = Deadline(0)


def take_room(num_bytes: int) -> None:
    """Raise SharedMemoryFull beyond a limit where the kernel would kill a process instead."""
    if num_bytes > _Room.left or not _Room.expiry.left():
        _Room.left, _Room.expiry = check_room(num_bytes) // _PART, Deadline(_LOOK_SECONDS)
    _Room.left -= num_bytes


def _room_by_limit() -> list[tuple[int, str]]:
    """How many bytes each limit on this process leaves, and the limit in words."""
    available = [line.split()[1] for line in _lines("/proc/meminfo") if "MemAvailable:" in line]
    found = [(int(kib) * 1024, "the memory of this machine") for kib in available or [str(2**53)]]
    for line in _lines("/proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2
            root, limit, usage = "/sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            root, limit = "/sys/fs/cgroup/memory", "memory.limit_in_bytes"
            usage = "memory.usage_in_bytes"
        else:
            continue
        # The limits of the groups above it hold as well. In a container the path may be that on the
        # host, and its own group is at the root.
        own = Path(root, path.lstrip("/"))
        for folder in (own, *(each for each in own.parents if each.is_relative_to(root))):
            most, used = _lines(folder / limit), _lines(folder / usage)
            if not used or not most or not most[0].isdigit():  # "max", where there is no limit
                continue
            # It includes file pages not used lately, which go when memory is needed.
            stat = dict(pair.split()[:2] for pair in _lines(folder / "memory.stat"))
            idle = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
            room = int(most[0]) - int(used[0]) + idle
            found.append((room, f"the memory limit of its control group {path!r}"))
    return found


def _lines(path: str | Path) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def _in_words(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"
