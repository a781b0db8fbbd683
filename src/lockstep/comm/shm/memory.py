"""Memory that several processes see, and sockets that carry its descriptors between them."""

from __future__ import annotations

import array
import ctypes
import errno
import fcntl
import mmap
import os
import resource
import socket
import struct
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from ctypes import c_int, c_size_t, c_void_p
from pathlib import Path
from typing import NamedTuple

import torch

from lockstep.deadline import Deadline
from lockstep.errors import SharedMemoryFull
from lockstep.memory_files import sealable_file

# From <fcntl.h>, where Python doesn't have them.
_F_ADD_SEALS, _F_SEAL_SEAL, _F_SEAL_SHRINK = 1033, 1, 2
# From <sys/mman.h>, <fcntl.h> and Python's <memoryobject.h>.
_MAP_FAILED = c_void_p(-1).value
_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_WRITABLE = 0x200
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid

# For how long after a look at the limits which part of the room may be taken without another look.
_PART = 16
_LOOK_SECONDS = 0.5

_FIXED = 0x10  # from <sys/mman.h>: at the given address

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = c_void_p
_libc.mmap.argtypes = (c_void_p, c_size_t, c_int, c_int, c_int, ctypes.c_long)
_libc.munmap.argtypes = (c_void_p, c_size_t)
_libc.madvise.argtypes = (c_void_p, c_size_t, c_int)
_libc.fallocate.argtypes = (c_int, c_int, ctypes.c_long, ctypes.c_long)
_view_prototype = ctypes.PYFUNCTYPE(ctypes.py_object, c_void_p, ctypes.c_ssize_t, c_int)
_memoryview_of = _view_prototype(("PyMemoryView_FromMemory", ctypes.pythonapi))

# The memory of this process that others may see, by address: its number of bytes.
_shared_at: dict[int, int] = {}


class Segment:
    """Memory of this process, in a file that has no name, which others map by its descriptor.

    It may grow. The kernel frees it with the last process that maps it or has its descriptor, and
    the size of ``/dev/shm`` doesn't matter. Its pages exist from the start: a lack of memory is an
    error here, and not a signal later. It can't be shrunk, so no process can make another's access
    fail.

    Attributes:
        descriptor: The file descriptor, or -1 after :meth:`close`.
        offset_at: By address in this process, the offset of each memory of :meth:`add`.
        lent: The addresses of memory that other processes may read after it is closed here.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.offset_at: dict[int, int] = {}
        self.lent: set[int] = set()
        self._size = 0
        self._lock = threading.Lock()
        # Offsets of pages that were given back, from one to another; and those that finalizers, in
        # whichever thread, have given back since.
        self._free: list[tuple[int, int]] = []
        self._freed: deque[tuple[int, int]] = deque()

    @classmethod
    def create(cls, num_bytes: int) -> tuple[Segment, torch.Tensor]:
        """Return a new segment of ``num_bytes``, and its bytes as a tensor.

        Raises:
            SharedMemoryFull: If there isn't enough memory.
        """
        try:
            segment = cls(sealable_file("lockstep"))
            fcntl.fcntl(segment.descriptor, _F_ADD_SEALS, _F_SEAL_SEAL | _F_SEAL_SHRINK)
        except OSError as error:
            raise no_room(num_bytes, error) from error
        try:
            return segment, segment._grow(num_bytes)[1]
        except BaseException:
            segment.close()
            raise

    def add(self, num_bytes: int) -> torch.Tensor:
        """Return more memory, which is given back when no tensor of this process uses it.

        Raises:
            SharedMemoryFull: If there isn't enough memory.
        """
        start, tensor = self._grow(num_bytes, _Owner(self.offset_at, self._freed, os.getpid()))
        self.offset_at[tensor.data_ptr()] = start
        _shared_at[tensor.data_ptr()] = num_bytes
        return tensor

    def _grow(self, num_bytes: int, owner: _Owner | None = None) -> tuple[int, torch.Tensor]:
        """Return the offset of ``num_bytes`` more, at a page's beginning, and the bytes."""
        take_room(num_bytes)
        size = _in_pages(num_bytes)
        with self._lock:
            start = self._take_free(size)
        try:
            os.posix_fallocate(self.descriptor, start, size)
            return start, map_memory(self.descriptor, start, num_bytes, owner)
        except (OSError, SharedMemoryFull) as error:
            release(self.descriptor, start, size)
            self._freed.append((start, start + size))
            if isinstance(error, OSError):
                raise no_room(num_bytes, error) from error
            raise

    def _take_free(self, size: int) -> int:
        """Return the offset of ``size`` bytes that nobody uses, behind all others if need be."""
        while self._freed:
            self._free.append(self._freed.popleft())
        joined: list[tuple[int, int]] = []
        for start, stop in sorted(self._free):
            if joined and joined[-1][1] == start:
                start = joined.pop()[0]
            joined.append((start, stop))
        self._free = joined
        for number, (start, stop) in enumerate(joined):
            if stop - start >= size:
                joined[number : number + 1] = [(start + size, stop)] if stop > start + size else []
                return start
        self._size += size
        return self._size - size

    def close(self) -> None:
        """Close the descriptor; the memory stays as long as tensors or other processes use it."""
        descriptor, self.descriptor = self.descriptor, -1
        for pointer in self.lent:
            self.offset_at.pop(pointer, None)
        if descriptor >= 0:
            os.close(descriptor)


class _Owner(NamedTuple):
    """Where memory that no tensor uses any more is told of, by the process that has made it."""

    offset_at: dict[int, int]
    freed: deque[tuple[int, int]]
    process: int


def _in_pages(num_bytes: int) -> int:
    return -(-max(num_bytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE


def map_memory(
    descriptor: int,
    start: int,
    num_bytes: int,
    owner: _Owner | None = None,
    *,
    is_private: bool = False,
) -> torch.Tensor:
    """Return the bytes of a segment from ``start`` on, the beginning of a page.

    Args:
        owner: Who gets the memory back with the last tensor, if anybody does.
        is_private: Whether pages that this process writes to become its own.

    Raises:
        SharedMemoryFull: If this process may not have that much address space.
    """
    # Not by mmap.mmap, which keeps a copy of the descriptor, of which a process may have a thousand
    # by default. Shown by test_memory_that_all_ranks_have_mapped_takes_no_descriptor.
    num_bytes = max(num_bytes, 1)
    access = mmap.PROT_READ | mmap.PROT_WRITE
    kind = mmap.MAP_PRIVATE if is_private else mmap.MAP_SHARED
    pointer = _libc.mmap(None, num_bytes, access, kind, descriptor, start)
    if pointer == _MAP_FAILED:
        number = ctypes.get_errno()
        raise no_room(num_bytes, OSError(number, os.strerror(number)))
    view = _memoryview_of(pointer, num_bytes, _WRITABLE)
    weakref.finalize(view, _unmap, pointer, num_bytes, owner).atexit = False
    return torch.frombuffer(view, dtype=torch.uint8)


def _unmap(pointer: int, num_bytes: int, owner: _Owner | None) -> None:
    # In this order, as something else may be at this address as soon as it is unmapped. Shown by
    # test_memory_at_the_address_of_dropped_memory_is_known.
    if owner is not None:
        _shared_at.pop(pointer, None)
    if owner is not None and owner.process == os.getpid():
        start = owner.offset_at.pop(pointer, None)
        if start is not None:  # or others may read it still
            _libc.madvise(pointer, num_bytes, mmap.MADV_REMOVE)  # though other processes may map it
            owner.freed.append((start, start + _in_pages(num_bytes)))
    _libc.munmap(pointer, num_bytes)


def is_shared(memory: torch.Tensor) -> bool:
    """Whether other processes may see ``memory``, a buffer as :meth:`Segment.add` has made it."""
    return memory.untyped_storage().data_ptr() in _shared_at


def leave_to_others(memory: torch.Tensor, *, keeps: bool) -> None:
    """Let this process have shared ``memory`` alone, with the same bytes if it ``keeps`` them.

    A forked child calls it, which no operator of torch may do there: in its first call it takes a
    lock that another thread of the parent may have had at the fork, and nobody gives back. Shown by
    test_a_forked_child_calls_no_operator_for_its_memory.
    """
    pointer = memory.untyped_storage().data_ptr()
    num_bytes = _shared_at.pop(pointer)
    values = bytes(bytes_of(memory)) if keeps else None
    access, kind = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    if _libc.mmap(pointer, _in_pages(num_bytes), access, kind | _FIXED, -1, 0) == _MAP_FAILED:
        number = ctypes.get_errno()
        raise no_room(num_bytes, OSError(number, os.strerror(number)))
    if values is not None:
        bytes_of(memory)[:] = values


def drop_pages(private: torch.Tensor, start: int, stop: int) -> None:
    """Drop this process's own pages of a private mapping, from one byte to another."""
    _libc.madvise(private.data_ptr() + start, stop - start, mmap.MADV_DONTNEED)


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
    if error.errno == errno.EFBIG:
        limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        return SharedMemoryFull(
            f"There is no room for {what}: {error}. To the kernel it is a file, and this process "
            f"may have files of {limit >> 10} KiB; raise that limit (ulimit -f), or use the "
            "backend 'gloo', which needs none."
        )
    if error.errno in (errno.ENOSYS, errno.EPERM, errno.EACCES):
        return SharedMemoryFull(
            f"This system doesn't let processes share memory, so there is none for {what}: {error} "
            "(memfd_create). Use the backend 'gloo', which needs none."
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
        group = Path(root, path.lstrip("/"))
        for folder in (group, *(each for each in group.parents if each.is_relative_to(root))):
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


# Sockets that carry descriptors. Not by socket.send_fds and socket.recv_fds: in Python 3.11 they
# drop the flags that they are given.


def send_message(
    connection: socket.socket,
    message: bytes,
    descriptors: Sequence[int] = (),
    flags: int = 0,
    address: str | None = None,
) -> None:
    """Send one message and copies of ``descriptors``, to ``address`` if there is no connection."""
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
    connection.sendmsg([message], [rights] if descriptors else [], flags, address)


def receive_message(
    connection: socket.socket,
    num_bytes: int,
    num_descriptors: int,
    flags: int = 0,
    user: int | None = None,
) -> tuple[bytes, list[int]]:
    """Return one message, and the descriptors that came with it, which the caller must close.

    The kernel drops descriptors for which this process has no room. If ``user`` is given, messages
    from processes of other users are returned as empty; that takes the option SO_PASSCRED.
    """
    descriptors, sender = array.array("i"), None
    ancillary_bytes = socket.CMSG_SPACE(num_descriptors * descriptors.itemsize)
    ancillary_bytes += socket.CMSG_SPACE(_CREDENTIALS.size)
    # Closed on exec, so that a program that is started keeps neither socket nor memory alive.
    flags |= socket.MSG_CMSG_CLOEXEC
    try:
        message, ancillary, _, _ = connection.recvmsg(num_bytes, ancillary_bytes, flags)
    except ConnectionResetError:
        # The peer closed its end without reading everything. The kernel reports that once, before
        # what the peer had sent. Shown by
        # test_a_message_is_received_though_its_sender_left_without_reading.
        message, ancillary, _, _ = connection.recvmsg(num_bytes, ancillary_bytes, flags)
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
        elif (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
            _, sender, _ = _CREDENTIALS.unpack(data)
    return message if user in (None, sender) else b"", descriptors.tolist()


def shut_down(connection: socket.socket) -> None:
    """End a connection for both sides, whichever process or thread waits on it."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
