"""Memory of which the ranks of a host have one copy, and which behaves as if each had its own.

Each rank has mapped it twice. Through one mapping it writes what all are to see. The other one is
private: the rank sees what others have written, until it writes to a page itself; from then on it
has this page alone, and drops it when all agree on its values. Which pages those are is known to
the kernel. It is asked only if there was a page fault since it was last: a page becomes private in
one, and most training steps have none.

A process that is forked must not see later steps. So before a fork all pages become this process's
own, which the child inherits as it does other memory.

Source: ``mmap(2)``, ``proc_pid_fd(5)``, ``proc_pid_pagemap(5)``, ``getrusage(2)``.
"""

from __future__ import annotations

import functools
import os
import re
import resource
import sys
import weakref
from collections.abc import Sequence
from mmap import PAGESIZE

from lockstep.comm.shm.memory import bytes_of, drop_pages, map_memory

_PAGEMAP = "/proc/self/pagemap"
_ENTRY_BYTES = 8
# Of an entry's last byte, the upper three bits say whether the page is present, is swapped out, and
# is of a file or shared. So these translate it: to 1 for a private page.
_IS_PRIVATE = bytes(byte >> 5 in (0b100, 0b010) for byte in range(256))
_PRIVATE_PAGES = re.compile(b"\1+")


# Those of this process, whose pages are taken before a fork; empty until the first is made.
_copies: weakref.WeakSet[OneCopy] = weakref.WeakSet()


@functools.cache
def _watch_forks() -> None:
    os.register_at_fork(before=_take_pages_of_all)


def _take_pages_of_all() -> None:
    for copy in list(_copies):
        copy.take_pages()


def name_of(descriptor: int) -> list[int]:
    """Return what other processes of this user and host open this process's file by."""
    return [os.getpid(), descriptor, os.fstat(descriptor).st_ino]


class OneCopy:
    """One rank's mappings of a file in memory, whose :func:`name_of` it is given.

    Raises:
        OSError: If this system can't do it.
        SharedMemoryFull: If this process may not have that much address space.

    Attributes:
        shared: The bytes that all ranks see.
        private: The same bytes as this rank sees them, with its own changes.
        is_updated: Whether an update runs, in which this rank must get no further pages.
    """

    _pagemap, is_updated = -1, False
    # The number of page faults before the kernel was last asked for private pages, or -1; and
    # those pages, as far as they have not been dropped.
    _num_faults = -1
    _pages: Sequence[tuple[int, int]] = ()

    def __init__(self, name: Sequence[int], num_bytes: int) -> None:
        process, number, file = name
        descriptor = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(descriptor).st_ino != file:
                raise OSError(f"process {process} is another one here")
            self.shared = map_memory(descriptor, 0, num_bytes)
            self.private = map_memory(descriptor, 0, num_bytes, is_private=True)
        finally:
            os.close(descriptor)
        self._num_pages = -(-num_bytes // PAGESIZE)
        self._pagemap = os.open(_PAGEMAP, os.O_RDONLY | os.O_CLOEXEC)
        self._check()
        _watch_forks()
        _copies.add(self)

    def take_pages(self) -> None:
        """Make all pages this rank's own, as if it had written to each."""
        if not self.is_updated:
            firsts = bytes_of(self.private)[::PAGESIZE]
            firsts[:] = firsts

    def _check(self) -> None:
        """Raise OSError if the kernel doesn't tell which pages this rank has alone."""
        self.changed()
        self.private[0] = self.private[0].item()
        pages = self.changed()
        self.drop(pages)
        if not pages or pages[0][0] != 0:
            raise OSError(f"{_PAGEMAP} doesn't tell private pages, or page faults aren't counted")

    def changed(self) -> Sequence[tuple[int, int]]:
        """Return the bytes, from one to another, of pages that this rank has written to itself."""
        usage = resource.getrusage(resource.RUSAGE_SELF)
        num_faults = usage.ru_minflt + usage.ru_majflt
        if num_faults != self._num_faults:
            self._pages, self._num_faults = self._private_pages(), num_faults
        return self._pages

    def _private_pages(self) -> list[tuple[int, int]]:
        first = self.private.data_ptr() // PAGESIZE
        read = os.pread(self._pagemap, self._num_pages * _ENTRY_BYTES, first * _ENTRY_BYTES)
        if len(read) < self._num_pages * _ENTRY_BYTES:
            raise OSError(f"{_PAGEMAP} has no entries of this memory")
        last = _ENTRY_BYTES - 1 if sys.byteorder == "little" else 0
        runs = _PRIVATE_PAGES.finditer(read[last::_ENTRY_BYTES].translate(_IS_PRIVATE))
        return [(run.start() * PAGESIZE, run.end() * PAGESIZE) for run in runs]

    def drop(self, pages: Sequence[tuple[int, int]]) -> None:
        """Take over the values that all see in place of this rank's own ones."""
        for start, stop in pages:
            drop_pages(self.private, start, stop)
        if pages:
            self._pages, self._num_faults = (), -1

    def close(self) -> None:
        """Close the file descriptor; the memory stays as long as tensors use it."""
        descriptor, self._pagemap = self._pagemap, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        self.close()
