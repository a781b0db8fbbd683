"""What the kernel knows of processes: who ended how, who is left, and how to end them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
import warnings
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

# Every process that a run starts, however far down, has this in its environment, unless it
# cleared it. Those that left their rank's process group are found by it.
MARK = "LOCKSTEP_SUPERVISOR"
_PR_SET_PDEATHSIG = 1
_POLL_SECONDS = 0.02


class Exit(NamedTuple):
    """How a process ended: with an exit code, or by a signal."""

    code: int | None
    signal: int | None


def exit_of(pid: int) -> Exit | None:
    """How the child ``pid`` ended, or None if it hasn't.

    The child stays a zombie. So its number isn't given to another process, and a signal to its
    group cannot hit a stranger, until :func:`reap`.
    """
    info = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if info is None:
        return None
    if info.si_code == os.CLD_EXITED:
        return Exit(info.si_status, None)
    return Exit(None, info.si_status)


def reap(pid: int, *, wait: bool = True) -> None:
    """Forget the child ``pid``, which has ended or, if we ``wait``, is about to."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0 if wait else os.WNOHANG)


def fork() -> int:
    """``os.fork()`` without its warning of threads.

    The only ones here are numpy's: OpenBLAS ends its threads before a fork, and starts new ones
    on both sides when they are needed.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def end_with_parent(parent: int, number: signal.Signals) -> None:
    """Have the kernel send this process ``number`` when ``parent``, its parent, ends.

    Linux alone offers it. Elsewhere only the guardian ends the ranks of a killed launcher.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != parent:  # it ended before it was asked for
        os._exit(128 + number)


def fill_standard_descriptors() -> None:
    """Open /dev/null as stdin, stdout or stderr if it is closed, as by ``>&-``.

    The next pipe would otherwise get its number, and be written to by mistake.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            # It gets the lowest number that is free, which is this one.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


def flush_standard_streams() -> None:
    """Write what Python still holds, before a fork doubles it or an exec drops it."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # it is None where the descriptor was closed
            stream.flush()


def signal_group(group: int, number: int) -> None:
    """Send ``number`` to a process group, if there is anyone left in it."""
    # macOS answers PermissionError for a group of zombies.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def sweep(groups: Collection[int], mark: str, *, spare: int, grace_seconds: float) -> None:
    """End what is left of the process groups and of all that was started with ``mark``.

    First SIGTERM, so that what cleans up may; then SIGKILL. ``spare`` is left alone.
    """
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + grace_seconds
        asked: set[int] = set()
        while left := set(leftovers(groups, mark)) - {spare}:
            for pid in left - asked:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)
            asked |= left
            if time.monotonic() > deadline:
                break
            time.sleep(_POLL_SECONDS)


def leftovers(groups: Collection[int], mark: str) -> Iterator[int]:
    """The processes of ``groups`` and with ``mark``, other than this one and zombies."""
    entry = f"{MARK}={mark}".encode()
    for directory in Path("/proc").glob("[0-9]*"):
        pid = int(directory.name)
        if pid == os.getpid():
            continue
        # A process may end while it is looked at, or belong to someone else.
        with contextlib.suppress(OSError):
            # After the command, which may hold any character: state, parent, process group.
            fields = (directory / "stat").read_bytes().rpartition(b")")[2].split()
            if fields[0] in (b"Z", b"X"):
                continue
            environment = (directory / "environ").read_bytes().split(b"\0")
            if int(fields[2]) in groups or entry in environment:
                yield pid
