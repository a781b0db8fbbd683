"""What the kernel knows of processes: who ended how, who is left, and how to end them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import NamedTuple

# Every process that a run starts, however far down, has this in its environment, unless it
# cleared it. When the supervisor was killed, those that left their rank's process group are found
# by it.
MARK = "LOCKSTEP_SUPERVISOR"
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
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


def fork_helper(work: Callable[[], object], *descriptors: int) -> int:
    """Fork a process that does ``work`` and ends, and return its process id.

    It is out of reach of the terminal, and of what ends this process's group. It has the
    ``descriptors``, numbered from 0, and no others: one that stayed open would keep a pipe's
    reader waiting for its end.
    """
    pid = fork()
    if pid:
        return pid
    # Never return into the caller's code, whatever happens.
    try:
        os.setsid()
        for ending in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(ending, signal.SIG_IGN)
        signal.set_wakeup_fd(-1)
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
        os.closerange(len(descriptors), os.sysconf("SC_OPEN_MAX"))
        fill_standard_descriptors()
        work()
    finally:
        os._exit(0)


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


def adopt_orphans() -> None:
    """Become the parent of whatever is below this process when its own parent ends.

    So what a rank started remains a descendant, whatever session or environment it has.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children() -> list[int]:
    """The processes that this one is the parent of, ended ones too, as far as can be told."""
    listed = Path(f"/proc/self/task/{os.getpid()}/children")
    return [int(pid) for pid in listed.read_text().split()] if listed.exists() else []


def sweep(*, spare: Collection[int], grace_seconds: float) -> None:
    """End what is left below this process, but for ``spare`` and what is below those.

    First SIGTERM, so that what cleans up may; then SIGKILL.
    """
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + grace_seconds
        asked: set[int] = set()
        while left := _descendants(spare):
            for pid in left - asked:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)
            asked |= left
            if time.monotonic() > deadline:
                break
            time.sleep(_POLL_SECONDS)


def _descendants(spare: Collection[int]) -> set[int]:
    of_parent: dict[int, list[int]] = {}
    for process in _living():
        of_parent.setdefault(process.parent, []).append(process.pid)
    found: set[int] = set()
    parents = [os.getpid()]
    while parents:
        below = [pid for pid in of_parent.get(parents.pop(), []) if pid not in spare]
        found.update(below)
        parents += below
    return found


def leftovers(groups: Collection[int], mark: str) -> Iterator[int]:
    """The processes of ``groups`` and with ``mark``, other than this one and zombies."""
    entry = f"{MARK}={mark}".encode()
    for process in _living():
        # It may have ended meanwhile, or be someone else's.
        with contextlib.suppress(OSError):
            is_ours = process.group in groups
            if is_ours or entry in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0"):
                yield process.pid


class _Process(NamedTuple):
    pid: int
    parent: int
    group: int


def _living() -> Iterator[_Process]:
    """All processes but for this one and zombies."""
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended
            # After the command, which may hold any character: state, parent, process group.
            fields = (directory / "stat").read_bytes().rpartition(b")")[2].split()
            if fields[0] not in (b"Z", b"X") and int(directory.name) != os.getpid():
                yield _Process(int(directory.name), int(fields[1]), int(fields[2]))
