"""The process from which the attempts of a run that restarts are forked, and their launcher's side.

It has imported all that ranks need, and has one thread, while the launcher gets threads for stores
and output: a fork of the launcher could find a lock held for ever. For each attempt it forks a
process that forks the ranks and their guardian, hands them to the launcher, and ends. So they
become children of the launcher, which adopts orphans, as if it had forked them itself.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, NoReturn

from lockstep.deadline import Deadline
from lockstep.errors import LaunchError
from lockstep.launcher import processes
from lockstep.launcher.job import Job
from lockstep.launcher.rank_process import RankProcess, fork_ranks, kill_ranks
from lockstep.launcher.starting import StartOfMany
from lockstep.status import RunStatus

_MESSAGE_BYTES = 1 << 16
_MOST_DESCRIPTORS = 3  # of one message: a rank's connection and its two outputs
_FORK_SECONDS = 120.0
_POLL_SECONDS = 0.05
_READ = b"."
# Files by which a process uses a device; those of an accelerator can't be used after a fork.
_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/", "/dev/accel", "/dev/davinci")


def import_what_ranks_need() -> None:
    """Import what most programs do, before ranks are forked.

    A process's first optimizer imports ``torch._dynamo``, which takes as long as torch itself.
    """
    importlib.import_module("torch._dynamo")
    package = importlib.import_module("lockstep")
    for name in package.__all__:
        getattr(package, name)
    gc.collect()


class Attempt(NamedTuple):
    """The ranks of this host, which wait to begin, and their guardian."""

    number: int
    ranks: list[RankProcess]
    guardian: processes.Guardian


class Zygote:
    """The launcher's side.

    Attributes:
        pid: Of the process.
        spare: Processes that aren't to be ended with the ranks that run: this one, and ranks and
            guardians that it has forked since.
    """

    def __init__(self, pid: int, line: socket.socket, wants_result: bool) -> None:
        self.pid = pid
        self.spare = {pid}
        self._line = line
        self._wants_result = wants_result
        self._asked: int | None = None  # the attempt that is being forked
        self._ranks: list[RankProcess] = []
        self._guardian: processes.Guardian | None = None
        self._is_forked = False
        self._error: str | None = None

    def fileno(self) -> int:
        """Of what is readable when there is something to :meth:`receive`."""
        return self._line.fileno()

    def ask(self, number: int) -> None:
        """Have the ranks of an attempt forked, if they aren't yet."""
        if self._asked is None:
            self._asked = number
            try:
                self._line.send(str(number).encode())
            except OSError:  # it has ended
                self._lose()

    def receive(self) -> bool:
        """Note what it tells of the ranks that it forks; return whether it has ended."""
        received, descriptors, _, _ = socket.recv_fds(self._line, _MESSAGE_BYTES, _MOST_DESCRIPTORS)
        if not received:
            self._lose()
            return True
        told: dict[str, Any] = json.loads(received)
        if "rank" in told:
            connection, *outputs = descriptors
            line, pid = socket.socket(fileno=connection), told["pid"]
            rank = RankProcess(told["rank"], pid, line, outputs, told["has_terminal"])
            rank.wants_result = self._wants_result
            self._ranks.append(rank)
            self.spare.add(pid)
        elif "guardian" in told:
            self._guardian = processes.Guardian(told["guardian"], *descriptors)
            self.spare.add(self._guardian.pid)
            self._line.send(_READ)
        elif "error" in told:
            self._error = told["error"]
        else:
            self._is_forked = True
        return False

    def _lose(self) -> None:
        self._error = "The process from which they are forked has ended."
        self._is_forked = True

    def take(self, number: int, is_interrupted: Callable[[], bool]) -> Attempt | None:
        """Return an attempt as soon as it is forked; None if that is interrupted.

        Raises:
            LaunchError: If it can't be forked. None is left behind.
        """
        self.ask(number)
        deadline = Deadline(_FORK_SECONDS)
        while not self._is_forked:
            if select.select([self._line], [], [], _POLL_SECONDS)[0]:
                self.receive()
            elif is_interrupted():
                return None
            elif not deadline.left():
                self._error = f"They weren't there after {_FORK_SECONDS:g} s."
                break
        ranks, guardian, error = self._ranks, self._guardian, self._error
        self._asked, self._ranks, self._guardian, self._is_forked = None, [], None, False
        if guardian is None or error is not None:
            kill_ranks(ranks)
            raise LaunchError(f"The ranks can't be started again: {error or 'they have ended.'}")
        self.spare -= {rank.pid for rank in ranks}
        return Attempt(number, ranks, guardian)

    def end(self) -> None:
        """End the process, and ranks that wait to begin."""
        kill_ranks(self._ranks)
        self._line.close()
        processes.send_signal(self.pid, signal.SIGKILL)
        processes.reap(self.pid)
        if self._guardian is not None:
            self._guardian.dismiss()


def fork_zygote(
    job: Job, signal_mask: Collection[int], status: RunStatus
) -> Zygote | Callable[[], int]:
    """Fork the process, and return the launcher's side of it.

    In a rank, return what to call there: see :func:`fork_ranks`.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    launcher = os.getpid()
    processes.flush_standard_streams()
    if pid := processes.fork():
        theirs.close()
        return Zygote(pid, ours, isinstance(job.program, bytes))
    try:
        ours.close()
        processes.end_with_parent(launcher, signal.SIGKILL)
        if job.caller is not None:
            os.close(job.caller)
            job = job._replace(caller=None)
        return _Server(job, signal_mask, status, launcher, theirs).run()
    except BaseException:  # it must not return into the launcher's code
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


class _Server(NamedTuple):
    """The process itself."""

    job: Job
    signal_mask: Collection[int]
    status: RunStatus
    launcher: int
    line: socket.socket

    def run(self) -> Callable[[], int]:
        """Fork attempts until the launcher ends; in a rank, return what to call there."""
        while request := self.line.recv(_MESSAGE_BYTES):
            if reason := unfit():
                self._tell(error=reason)
            elif (pid := processes.fork()) == 0:
                return self._fork_attempt()
            else:
                processes.reap(pid)
            self._tell(forked=int(request))
        os._exit(0)

    def _fork_attempt(self) -> Callable[[], int]:
        """In a process of its own, fork the ranks of an attempt."""
        start = StartOfMany(self.job, self.status)
        try:
            ranks = fork_ranks(self.job, self.signal_mask, self.status, start, self.launcher)
        except LaunchError as error:
            self._tell(error=str(error))
            os._exit(1)
        if not isinstance(ranks, list):
            self.line.close()
            return ranks
        return self._hand_over(ranks)

    def _hand_over(self, ranks: Sequence[RankProcess]) -> NoReturn:
        guardian = processes.Guardian.start([rank.pid for rank in ranks])
        for rank in ranks:
            descriptors = rank.connection.fileno(), *rank.outputs
            self._tell(descriptors, rank=rank.rank, pid=rank.pid, has_terminal=rank.has_terminal)
        self._tell([guardian.lifeline], guardian=guardian.pid)
        # The launcher adopts the ranks when this process ends: not before it knows them.
        self.line.recv(len(_READ))
        os._exit(0)

    def _tell(self, descriptors: Sequence[int] = (), **told: object) -> None:
        socket.send_fds(self.line, [json.dumps(told).encode()], descriptors)


def unfit() -> str | None:
    """Why this process mustn't be forked, None if it may: it has threads, or uses a device."""
    if (number := len(os.listdir("/proc/self/task"))) > 1:
        return f"The process from which they are forked has {number} threads."
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            path = os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:  # that of the listing itself
            continue
        if path.startswith(_DEVICES):
            return f"The process from which they are forked uses {path}."
    return None
