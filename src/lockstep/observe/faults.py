"""What only observes a run never ends it: a fault is told of once, and training goes on without.

A full disk, a folder that was removed or a limit on open files is no reason to lose hours of
training for a record of them.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lockstep.errors import TraceError
from lockstep.folders import open_to_write
from lockstep.printable import printable

_log = logging.getLogger("lockstep")
_CHUNK_BYTES = select.PIPE_BUF  # for which a pipe that polls as writable has room


def give_up(what: str, error: BaseException, lost: str) -> None:
    """Tell that ``what`` has failed, and what is ``lost`` by that. It can't fail itself."""
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    with suppress(Exception):  # whatever handlers the program has given to logging
        _log.warning("%s: %s. %s Training goes on.", printable(what), reason, lost)


def make_folder(path: Path) -> None:
    """Make a folder and those that it is in.

    Raises:
        FileExistsError: If one of them is a file: a mistake, which is no fault of the machine.
        OSError: If it can't be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except NotADirectoryError as error:
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from error


@contextmanager
def only_observing(what: str, lost: str) -> Iterator[None]:
    """Tell of a file that can't be written or read inside of the context, and go on after it.

    Raises:
        FileExistsError: If :func:`make_folder` did.
    """
    try:
        yield
    except FileExistsError:
        raise
    except (OSError, TraceError) as error:
        give_up(what, error, lost)


def write_line(line: str) -> bool:
    """Write a line to stderr, and tell whether there was room for it: nothing is waited for.

    Its reader may be gone, or a pager or a terminal that was told to pause (Ctrl-S).
    """
    stream = sys.stderr
    try:
        descriptor = stream.fileno()
    except (AttributeError, OSError, ValueError):  # a notebook's, say; or it is closed
        with suppress(AttributeError, OSError, ValueError):
            stream.write(line + "\n")
        return True
    rest = (line + "\n").encode(errors="backslashreplace")
    with suppress(OSError, ValueError):
        stream.flush()
        while rest and _has_room(descriptor):
            rest = rest[os.write(descriptor, rest[:_CHUNK_BYTES]) :]
    return not rest


def _has_room(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return any(event & select.POLLOUT for _, event in poll.poll(0))


class Spool:
    """A file that takes lines until it can't, and tells of that once.

    There is no buffer, which would fail once more when it is closed.

    Args:
        path: Its name. What an earlier run has left there stays until :meth:`empty`.
        what: What can't be written if it fails, such as ``"rank 0's trace"``.
        lost: What is lost by that, as a sentence.

    Raises:
        FileExistsError: If its folder is a file.
    """

    def __init__(self, path: Path, what: str, lost: str) -> None:
        self.path, self._what, self._lost = path, what, lost
        self._descriptor: int | None = None
        with only_observing(f"{what} can't be written to {path}", lost):
            make_folder(path.parent)
            self._descriptor = open_to_write(path, os.O_WRONLY | os.O_APPEND)

    @property
    def is_open(self) -> bool:
        """Whether it takes lines."""
        return self._descriptor is not None

    def empty(self) -> None:
        """Remove what the file has."""
        self._do(lambda descriptor: os.ftruncate(descriptor, 0))

    def write(self, data: bytes) -> None:
        """Append whole lines. After a fault, the last one in the file may be cut off."""

        def append(descriptor: int) -> None:
            view = memoryview(data)
            while view:
                view = view[os.write(descriptor, view) :]

        self._do(append)

    def close(self) -> None:
        """Take no more lines."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with only_observing(f"{self._what} can't be written to {self.path}", self._lost):
                os.close(descriptor)

    def _do(self, act: Callable[[int], None]) -> None:
        if self._descriptor is None:
            return
        try:
            act(self._descriptor)
        except OSError as error:
            descriptor, self._descriptor = self._descriptor, None
            with suppress(OSError):
                os.close(descriptor)
            give_up(f"{self._what} can't be written to {self.path}", error, self._lost)
