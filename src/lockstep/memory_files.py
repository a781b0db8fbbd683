"""Open files that no folder has: in memory, for other processes of this user.

Others are handed the descriptor, or find the file at ``/proc/PID/fd`` by the name that it was made
with. No other user can open it there, or take its name first, and it ends with the last process
that has it open, however that ends.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import stat
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

# From <sys/mman.h>.
CLOEXEC, ALLOW_SEALING = 1, 2
_FOLDER = "/dev/shm"
_LEAST_BYTES = 1 << 16  # of room in a folder that is used
_LINK = re.compile(r"/memfd:(.*?)(?: \(deleted\))?|.*/lockstep-\w{8}\.([^/]*) \(deleted\)", re.S)


def sealable_file(name: str, flags: int = CLOEXEC | ALLOW_SEALING) -> int:
    """Return the descriptor of a file of the system's own for this, a memfd.

    Raises:
        OSError: If the system has none, or a sandbox refuses it.
    """
    try:
        return os.memfd_create(name, flags)
    except AttributeError:  # this Python was built for older systems, as conda's is
        libc = ctypes.CDLL(None, use_errno=True)
        if not hasattr(libc, "memfd_create"):
            raise OSError(errno.ENOSYS, "The system's library has no memfd_create") from None
        if (descriptor := libc.memfd_create(name.encode(), flags)) < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number)) from None
        return int(descriptor)


def memory_file(name: str) -> int:
    """Return the descriptor of a file in memory; without memfds, one that is removed at once.

    Raises:
        OSError: If there is no room for it, or no folder.
    """
    try:
        return sealable_file(name, CLOEXEC)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EPERM, errno.EACCES):
            raise
    tried = []
    for folder in (_FOLDER, None):  # None: the temporary folder
        try:
            # Made anew, for this user alone; /proc shows its name when it has none any more.
            descriptor, path = tempfile.mkstemp(f".{name}", "lockstep-", folder)
            os.unlink(path)
            _check_room(descriptor)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise
            tried.append(str(error))
        else:
            return descriptor
    raise OSError(
        errno.ENOENT,
        "This system has no memfd_create, and there is no folder to make a file in that processes "
        f"share ({'; '.join(tried)}). Let TMPDIR name a folder that can be written to",
    )


def _check_room(descriptor: int) -> None:
    """Raise OSError where a folder is full: who writes to memory without any is ended."""
    try:
        os.posix_fallocate(descriptor, 0, _LEAST_BYTES)
        os.ftruncate(descriptor, 0)
    except OSError:
        os.close(descriptor)
        raise


def name_of(path: str) -> str:
    """The name of the file in memory at ``path``, as in /proc/PID/fd/5; "" if it is none.

    Raises:
        OSError: If it was closed, or is another user's.
    """
    found = _LINK.fullmatch(os.readlink(path))
    return (found[1] or found[2] or "") if found else ""


def open_in_memory(path: str, name: str, flags: int = os.O_RDONLY) -> int:
    """Return the descriptor of the open file at ``path``, one that :func:`memory_file` made.

    Another user's process may have there what it likes by now: a pipe, which would keep its reader,
    or a file of somebody else that has such a name in a folder.

    Raises:
        OSError: If it is no file in memory whose name begins with ``name``.
    """
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        is_nameless = stat.S_ISREG(found.st_mode) and not found.st_nlink
        if not is_nameless or not name_of(f"/proc/self/fd/{descriptor}").startswith(name):
            raise OSError(errno.EINVAL, "It is no file in memory", path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def files_in_memory(name: str) -> Iterator[tuple[int, str]]:
    """Yield the open files in memory whose names begin with ``name``: process id and path."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process has just ended, or is another user's
            for descriptor in os.listdir(process / "fd"):
                with suppress(OSError):  # it was closed meanwhile
                    path = f"{process}/fd/{descriptor}"
                    if name_of(path).startswith(name):
                        yield int(process.name), path
