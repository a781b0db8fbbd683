"""Processes and signals: how children end, and the end of all processes that a run started."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import resource
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from lockstep.deadline import Deadline
from lockstep.errors import LaunchError
from lockstep.run_status import stat_fields

# Name of an environment variable that every process of a run inherits. If the supervisor was
# killed, the guardian finds by it the processes that have left their rank's process group.
MARK = "LOCKSTEP_SUPERVISOR"
# Signals that end a launcher, and by default would leave its ranks running.
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Signals that mean what a program wants them to, such as a checkpoint before its time is over. They
# end one that has no handler, so they are passed on to ranks that have one, or wait for them.
PASSED_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
SIGNALS = (*ENDING_SIGNALS, *PASSED_SIGNALS)
# How long the other ranks may take to report failures of their own, once one rank has failed.
# Reports mostly arrive within 10 ms, but a death by signal, which may be the cause of them, is
# known only when the kernel has torn the process down.
_JUDGING_SECONDS = 0.2
# The same, if they are started again, and one failure is known that no other rank's explains.
_QUICK_JUDGING_SECONDS = 0.02
_GIVE_UP_SECONDS = 5.0
_SILENT_SECONDS = 3.0  # until it is told who is waited for
_SWEEP_SECONDS = 1.0
_LEAST_SWEEP_POLLS = 25  # however late they come: the machine may stand still
_POLL_SECONDS, _QUICK_POLL_SECONDS = 0.02, 0.001
_GOODBYE = b"."
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_SIGTIMEDWAIT = {"x86_64": "128", "aarch64": "137"}  # its number among system calls
_FLAGS_FIELD, _EXIT_CODE_FIELD, _PF_SIGNALED = 6, 49, 0x400


def exit_code_of_child(pid: int) -> int | None:
    """The exit code of a child, or minus the signal that ended it; None if it is running.

    The child stays a zombie until :func:`reap`, so its process id isn't reused, and a signal to
    its process group cannot hit a stranger.
    """
    info = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if info is None:
        return None
    return info.si_status if info.si_code == os.CLD_EXITED else -info.si_status


def ending_signal(pid: int) -> int:
    """The signal by which the kernel is ending a child, a zombie included; 0 if there is none.

    Source: ``proc_pid_stat(5)``, and ``PF_SIGNALED`` of the kernel's ``sched.h``.
    """
    with contextlib.suppress(OSError):  # it is gone
        fields = stat_fields(pid)
        if int(fields[_FLAGS_FIELD]) & _PF_SIGNALED:
            return int(fields[_EXIT_CODE_FIELD]) & 0x7F
    return 0


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped, by a signal or by who traces it."""
    with contextlib.suppress(OSError):  # it is gone
        return stat_fields(pid)[0] in ("T", "t")
    return False


def expects(pid: int, number: int) -> bool:
    """Whether the process ``pid`` has a handler for the signal ``number``, or waits for it.

    It waits for a signal that its main thread blocks, by ``signal.sigwait()`` or ``signalfd(2)``.
    """
    with contextlib.suppress(OSError):  # it is gone
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        fields = dict(line.split(":\t") for line in lines)
        signals = int(fields["SigCgt"], 16) | int(fields["SigBlk"], 16) | _waited_for(pid)
        return bool(signals >> (number - 1) & 1)
    return False


def _waited_for(pid: int) -> int:
    """The signals that a process's main thread waits for, which don't count as blocked meanwhile.

    Source: ``proc_pid_syscall(5)``, and ``rt_sigtimedwait(2)`` for the arguments.
    """
    with contextlib.suppress(OSError):  # it is gone, or must not be looked into
        call = Path(f"/proc/{pid}/syscall").read_text().split()
        if call[0] == _SIGTIMEDWAIT.get(platform.machine()):
            with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
                memory.seek(int(call[1], 16))
                return int.from_bytes(memory.read(8), sys.byteorder)
    return 0


def reap(pid: int, *, wait: bool = True) -> None:
    """Remove the zombie of the child ``pid``, after waiting for its end if ``wait``."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0 if wait else os.WNOHANG)


def fork() -> int:
    """``os.fork()`` without its warning of threads: of numpy's, which OpenBLAS ends before."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def end_with_parent(parent: int, number: signal.Signals) -> None:
    """Have the kernel send this process ``number`` when its parent ends."""
    _prctl(_PR_SET_PDEATHSIG, int(number))
    if os.getppid() != parent:  # it ended before the request
        os._exit(128 + number)


def fill_standard_descriptors() -> None:
    """Open /dev/null as a standard stream that is closed, or a pipe would get its number."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            # open() returns the lowest number that is free, which is this one.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


def flush_standard_streams() -> None:
    """Write Python's output buffers, which a fork would double and an exec would drop."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # None where the descriptor was closed
            stream.flush()


def send_signal(target: int, number: int) -> None:
    """Send ``number`` to a process or, if ``target`` is negative, to a process group."""
    # PermissionError: it runs as another user by now.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(target, number)


def adopt_orphans() -> None:
    """Become the parent of orphaned descendants, so that they remain ones in any session."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def children() -> list[int]:
    """The children of this process, zombies included; none where /proc doesn't list them."""
    listed = Path(f"/proc/self/task/{os.getpid()}/children")
    return [int(pid) for pid in listed.read_text().split()] if listed.exists() else []


def sweep(spare: set[int], *, at_once: bool = False) -> None:
    """End all descendants but ``spare`` and theirs: by SIGTERM, and after a while by SIGKILL."""
    for number in [signal.SIGKILL] if at_once else [signal.SIGTERM, signal.SIGKILL]:
        asked: set[int] = set()
        num_polls, deadline = 0, Deadline(_SWEEP_SECONDS)
        while num_polls < _LEAST_SWEEP_POLLS or deadline.left():
            if not (left := _descendants(spare)):
                return
            num_polls += 1
            for pid in left - asked:
                send_signal(pid, number)
            asked |= left
            time.sleep(_QUICK_POLL_SECONDS if at_once else _POLL_SECONDS)


def _descendants(spare: set[int]) -> set[int]:
    children_of: dict[int, list[int]] = {}
    for pid, parent, _ in _running_processes():
        children_of.setdefault(parent, []).append(pid)
    found: set[int] = set()
    parents = [os.getpid()]
    while parents:
        below = {*children_of.get(parents.pop(), [])} - spare
        found |= below
        parents += below
    return found


def _running_processes() -> Iterator[tuple[int, int, int]]:
    """Id, parent and process group of all processes of the host but this one and zombies."""
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended
            state, parent, group, *_ = stat_fields(pid := int(directory.name))
            if state not in ("Z", "X") and pid != os.getpid():
                yield pid, int(parent), int(group)


def check_descriptors(number: int) -> None:
    """Raise LaunchError unless so many more can be opened: torch would try for a minute."""
    opened: list[int] = []
    try:
        while len(opened) < number:
            opened.append(os.dup(0))
    except OSError as error:
        raise LaunchError(
            f"The launcher can't open the {number} files and connections that it needs besides "
            f"those it has, but {len(opened)}: {error.strerror}. Nothing was begun. Ask for "
            f"fewer ranks, or raise the limit on open files, which is "
            f"{resource.getrlimit(resource.RLIMIT_NOFILE)[0]} (ulimit -n)."
        ) from error
    finally:
        for descriptor in opened:
            os.close(descriptor)


class Guardian(NamedTuple):
    """A forked process that ends the ranks' process ``groups`` if the launcher is killed.

    The kernel ends the ranks themselves (see :func:`end_with_parent`), but not the processes that
    they started. It is out of reach of the terminal and of signals to this process's group, and
    has no descriptors but the lifeline, which no other process may hold open: any other would keep
    the reader of a pipe waiting for its end-of-file. So it is to be forked after the ranks.

    If the lifeline was lost before it came to the launcher, the groups alone are ended.
    """

    pid: int
    lifeline: int  # a descriptor, to be open in the launcher alone

    @classmethod
    def start(cls, groups: Collection[int], launcher: int) -> Guardian:
        """Fork it, for a process ``launcher``, which may be this one."""
        listening, lifeline = os.pipe()
        pid = fork()
        if pid == 0:
            try:
                os.setsid()
                for number in SIGNALS:
                    signal.signal(number, signal.SIG_IGN)
                os.dup2(listening, 0)
                os.closerange(1, os.sysconf("SC_OPEN_MAX"))
                fill_standard_descriptors()
                if os.read(0, 1) != _GOODBYE:
                    for group in groups:
                        send_signal(-group, signal.SIGKILL)
                    # Of all that have the mark, the launcher is one.
                    for _ in range(
                        2 if _has_ended(launcher) else 0
                    ):  # twice: one may have been starting another
                        for pid in _leftovers(groups):
                            send_signal(pid, signal.SIGKILL)
            finally:  # never return into the caller's code
                os._exit(0)
        os.close(listening)
        return cls(pid, lifeline)

    def dismiss(self) -> None:
        """Let the process end, and wait for its end."""
        with contextlib.suppress(BrokenPipeError):  # it was killed
            os.write(self.lifeline, _GOODBYE)
        os.close(self.lifeline)
        reap(self.pid)


def _has_ended(pid: int) -> bool:
    """Whether a process has ended, or does within a while: it closes its files before."""
    deadline = Deadline(_SWEEP_SECONDS)
    while deadline.left():
        try:
            if stat_fields(pid)[0] in ("Z", "X"):
                return True
        except OSError:
            return True
        time.sleep(_QUICK_POLL_SECONDS)
    return False


def _leftovers(groups: Collection[int]) -> Iterator[int]:
    entry = f"{MARK}={os.environ[MARK]}".encode()
    for pid, _, group in _running_processes():
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            environ = Path(f"/proc/{pid}/environ")
            if group in groups or entry in environ.read_bytes().split(b"\0"):
                yield pid


class SignalPipe:
    """A pipe that becomes readable when a signal arrives, which is then handled between waits.

    Args:
        stop_signals: Those that are to end the ranks, besides ENDING_SIGNALS.
    """

    def __init__(self, stop_signals: Collection[int] = ()) -> None:
        self._ending = {*ENDING_SIGNALS, *stop_signals}
        self.descriptors = os.pipe()
        self.pending: list[int] = []  # signals that aren't handled yet
        self.child_ended = False  # until its reader resets it
        for descriptor in self.descriptors:
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(self.descriptors[1], warn_on_full_buffer=False)
        self.listen()

    def listen(self) -> None:
        """Have signals arrive here, in place of other handlers."""
        handle(SIGNALS, lambda number, frame: None)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)

    def fileno(self) -> int:
        """The read end, for a selector."""
        return self.descriptors[0]

    def pull(self) -> None:
        """Read the signals that have arrived."""
        with contextlib.suppress(BlockingIOError):
            arrived = os.read(self.descriptors[0], 4096)
            self.pending += [number for number in arrived if number in SIGNALS]
            self.child_ended |= signal.SIGCHLD in arrived

    def wake(self) -> None:
        """Have a wait for signals end; any thread may."""
        with contextlib.suppress(BlockingIOError):  # it is full, and hence readable
            os.write(self.descriptors[1], b"\0")

    def wait(self, seconds: float | None) -> None:
        """Wait for a signal or :meth:`wake`, for so many seconds at most, if that isn't None."""
        poll = select.poll()
        poll.register(self, select.POLLIN)
        poll.poll(None if seconds is None else 1000 * seconds)
        self.pull()

    def is_pending(self) -> bool:
        """Whether an ending signal has arrived."""
        self.pull()
        return any(map(self.is_ending, self.pending))

    def is_ending(self, number: int) -> bool:
        """Whether the signal asks to end."""
        return number in self._ending

    def take_ending(self) -> list[int]:
        """Return the ending signals that have arrived, and forget all that have."""
        self.pull()
        arrived, self.pending = self.pending, []
        return [*filter(self.is_ending, arrived)]


def handle(numbers: Collection[int], handler: Callable[[int, FrameType | None], None]) -> None:
    """Install ``handler``, except for signals that nohup or a shell's ``&`` set to be ignored."""
    for number in numbers:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)


# A signal to send to the ranks, TELL, JUDGE or None, and the seconds until the next action is due.
Action = tuple[int | None, float]
TELL = 0  # who is still waited for
JUDGE = -1  # go on at once if it is known what failed first

AT_ONCE: list[Action] = [(signal.SIGKILL, _GIVE_UP_SECONDS)]


def after_failure(grace_seconds: float) -> list[Action]:
    """A rank has failed: wait for reports of the others, then end those."""
    # In two parts: if this process stood still for the first, the second is left.
    judging = [(None, _JUDGING_SECONDS / 2)] * 2
    return [*judging, *after_signal(signal.SIGTERM, grace_seconds)]


def after_failure_at_once() -> list[Action]:
    """The same, if the ranks are to be started again: they have nothing to save."""
    rest = _JUDGING_SECONDS - _QUICK_JUDGING_SECONDS
    return [(None, _QUICK_JUDGING_SECONDS), (JUDGE, rest), *AT_ONCE]


def after_signal(number: int, grace_seconds: float) -> list[Action]:
    """The launcher received ``number``: pass it on, as if the ranks had received it."""
    if number == signal.SIGINT:
        half = grace_seconds / 2
        return [*_patiently(number, half), *after_signal(signal.SIGTERM, half)]
    return [*_patiently(signal.SIGTERM, grace_seconds), *AT_ONCE]


def _patiently(number: int, seconds: float) -> list[Action]:
    if seconds <= _SILENT_SECONDS:
        return [(number, seconds)]
    return [(number, _SILENT_SECONDS), (TELL, seconds - _SILENT_SECONDS)]


class Escalation:
    """Actions that are still to be taken, and the time at which the next is due."""

    def __init__(self, actions: Sequence[Action]) -> None:
        self._actions = list(actions)
        self._due_at = 0.0

    def take(self, now: float) -> list[int]:
        """The signals to send now."""
        signals = []
        while self._actions and now >= self._due_at:
            number, seconds = self._actions.pop(0)
            self._due_at = now + seconds
            signals += [] if number is None else [number]
        return signals

    def skip(self) -> None:
        """Have the next action due now."""
        self._due_at = 0.0

    def seconds_left(self, now: float) -> float | None:
        """How long until the next action is due; None if all were taken, and their time is up."""
        left = max(0.0, self._due_at - now)
        return left if left or self._actions else None

    def seconds_to_kill(self, now: float) -> float:
        """How long until the last action, which is SIGKILL."""
        return self._due_at - now + sum(seconds for _, seconds in self._actions[:-1])
