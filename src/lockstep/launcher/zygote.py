"""The process from which the attempts of a run that restarts are forked, and their launcher's side.

It has imported all that ranks need, and has one thread, while the launcher gets threads for stores
and output: a fork of the launcher could find a lock held for ever. For each attempt it forks a
process that forks the ranks and their guardian, hands them to the launcher, and ends. So they
become children of the launcher, which adopts orphans, as if it had forked them itself. If it has
ended, or mustn't be forked any more, the launcher starts another one, which imports all anew.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

from lockstep.deadline import Deadline
from lockstep.errors import LaunchError
from lockstep.launcher import processes
from lockstep.launcher.interpreter import command_of
from lockstep.launcher.job import Job
from lockstep.launcher.rank_process import RankProcess, fork_ranks, kill_ranks
from lockstep.launcher.starting import StartOfMany
from lockstep.memory_files import memory_file
from lockstep.run_status import RunStatus

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

    ranks: list[RankProcess]
    guardian: processes.Guardian


class Forking(NamedTuple):
    """What ranks are forked with.

    Attributes:
        job: What is run.
        signal_mask: The signals that ranks block.
        snapshots: The descriptors of each rank's, which others don't get.
        launcher: The process that adopts the ranks.
    """

    job: Job
    signal_mask: tuple[int, ...]
    snapshots: tuple[tuple[int, ...], ...]
    launcher: int


class Unusable(LaunchError):
    """Nothing can be forked from the process."""


class NoRoom(LaunchError):
    """There is no room for so many ranks, ``num_ranks``."""

    def __init__(self, message: str, num_ranks: int) -> None:
        super().__init__(message)
        self.num_ranks = num_ranks


class Zygote:
    """The launcher's side.

    Args:
        pid: Of the process.
        line: The connection to it.
        forking: What it forks ranks with.

    Attributes:
        pid: Of the process.
        spare: Processes that aren't to be ended with the ranks that run: this one, and ranks and
            guardians that it has forked since.
    """

    def __init__(self, pid: int, line: socket.socket, forking: Forking) -> None:
        self.pid = pid
        self.spare = {pid}
        self._line, self._forking = line, forking
        self._wants_result = isinstance(forking.job.program, bytes)
        self._asked: int | None = None  # how many ranks are being forked
        self._ranks: list[RankProcess] = []
        self._guardian: processes.Guardian | None = None
        self._is_forked = False
        self._error: str | None = None
        self._is_unusable = False

    def fileno(self) -> int:
        """Of what is readable when there is something to :meth:`receive`."""
        return self._line.fileno()

    def ask(self, num_ranks: int) -> None:
        """Have so many ranks of the next attempt forked, if there aren't any yet."""
        if self._asked is None:
            self._asked = num_ranks
            try:
                self._line.send(str(num_ranks).encode())
            except OSError:  # it has ended
                self._lose()

    def receive(self) -> bool:
        """Note what it tells of the ranks that it forks; return whether it has ended."""
        try:
            message = socket.recv_fds(self._line, _MESSAGE_BYTES, _MOST_DESCRIPTORS)
        except ConnectionResetError:  # it has ended, and hasn't read a request
            message = (b"", [], 0, None)
        received, descriptors, _, _ = message
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
            with contextlib.suppress(OSError):  # it has ended
                self._line.send(_READ)
        elif "error" in told:
            self._error, self._is_unusable = told["error"], told["is_unusable"]
        else:
            self._is_forked = True
        return False

    def _lose(self) -> None:
        self._error = "The process from which they are forked has ended."
        self._is_forked = self._is_unusable = True

    def take(
        self, num_ranks: int, is_interrupted: Callable[[], bool], say: Callable[[str], None]
    ) -> Attempt | None:
        """Return an attempt as soon as it is forked; None if that is interrupted.

        It may have more ranks, if it was asked for before. If the process is of no use any more,
        that is said, and it is started anew.

        Raises:
            NoRoom: If there is no room for so many ranks. None is left behind.
            LaunchError: If it can't be forked. None is left behind.
        """
        try:
            return self._take(num_ranks, is_interrupted)
        except Unusable as error:
            say(f"{error} It is started anew, in some seconds.")
            self._start_anew()
            return self._take(num_ranks, is_interrupted)

    def _take(self, num_ranks: int, is_interrupted: Callable[[], bool]) -> Attempt | None:
        self.ask(num_ranks)
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
        asked, is_told = self._asked or num_ranks, self._is_forked
        self._asked, self._ranks, self._guardian, self._is_forked = None, [], None, False
        self._error = None
        if guardian is None or error is not None:
            kill_ranks(ranks)
            if guardian is not None:
                guardian.dismiss()
            words = f"The ranks can't be started again: {error or 'they have ended.'}"
            if self._is_unusable:
                raise Unusable(words)
            raise NoRoom(words, asked) if is_told and error else LaunchError(words)
        self.spare -= {rank.pid for rank in ranks}
        return Attempt(ranks, guardian)

    def _start_anew(self) -> None:
        """Start another process, which isn't a fork of this one: that has threads by now."""
        self._end_process()
        forking = self._forking
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        descriptor = memory_file("lockstep-forking")
        with theirs, open(descriptor, "w+b") as file:
            pickle.dump(forking._replace(job=forking.job._replace(caller=None)), file)
            file.seek(0)
            shared = [each for pair in forking.snapshots for each in pair]
            # Blocked, as they were when the first one was forked.
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, processes.SIGNALS)
            try:
                process = subprocess.Popen(
                    command_of(__name__, str(descriptor), str(theirs.fileno())),
                    pass_fds=(descriptor, theirs.fileno(), *shared),
                )
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        process.returncode = 0  # it is waited for elsewhere
        self.pid, self._is_unusable = process.pid, False
        self.spare.add(self.pid)

    def _end_process(self) -> None:
        self._line.close()
        processes.send_signal(self.pid, signal.SIGKILL)
        processes.reap(self.pid)
        self.spare.discard(self.pid)

    def end(self) -> None:
        """End the process, and ranks that wait to begin."""
        kill_ranks(self._ranks)
        self._end_process()
        if self._guardian is not None:
            self._guardian.dismiss()


def fork_zygote(forking: Forking, status: RunStatus) -> Zygote | Callable[[], int]:
    """Fork the process, and return the launcher's side of it.

    In a rank, return what to call there: see :func:`fork_ranks`.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    processes.flush_standard_streams()
    if pid := processes.fork():
        theirs.close()
        return Zygote(pid, ours, forking)
    try:
        ours.close()
        processes.end_with_parent(forking.launcher, signal.SIGKILL)
        job = forking.job
        if job.caller is not None:
            os.close(job.caller)
            forking = forking._replace(job=job._replace(caller=None))
        return _Server(forking, status, theirs).run()
    except BaseException:  # it must not return into the launcher's code
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def main() -> int:
    """Be a process that was started anew; in a rank, return the exit code."""
    descriptor, line = map(int, sys.argv[1:3])
    del sys.argv[1:]
    gc.disable()
    with open(descriptor, "rb") as file:
        forking: Forking = pickle.load(file)
    for shared in (line, *(each for pair in forking.snapshots for each in pair)):
        os.set_inheritable(shared, False)
    processes.end_with_parent(forking.launcher, signal.SIGKILL)
    import_what_ranks_need()
    status = RunStatus.of(forking.launcher)
    gc.freeze()
    gc.enable()
    return _Server(forking, status, socket.socket(fileno=line)).run()()


class _Server(NamedTuple):
    """The process itself."""

    forking: Forking
    status: RunStatus
    line: socket.socket

    def run(self) -> Callable[[], int]:
        """Fork attempts until the launcher ends; in a rank, return what to call there."""
        while request := self.line.recv(_MESSAGE_BYTES):
            if reason := unfit():
                self._tell(error=reason, is_unusable=True)
            elif (pid := processes.fork()) == 0:
                return self._fork_attempt(int(request))
            else:
                processes.reap(pid)
            self._tell(forked=int(request))
        os._exit(0)

    def _fork_attempt(self, num_ranks: int) -> Callable[[], int]:
        """In a process of its own, fork the ranks of an attempt."""
        forking = self.forking
        job = forking.job._replace(num_ranks=num_ranks)
        start = StartOfMany(job, self.status)
        try:
            ranks = fork_ranks(
                job,
                forking.signal_mask,
                self.status,
                start,
                forking.launcher,
                private=forking.snapshots,
            )
        except LaunchError as error:
            self._tell(error=str(error), is_unusable=False)
            os._exit(1)
        if not isinstance(ranks, list):
            self.line.close()
            return ranks
        return self._hand_over(ranks)

    def _hand_over(self, ranks: Sequence[RankProcess]) -> NoReturn:
        guardian = processes.Guardian.start([rank.pid for rank in ranks], self.forking.launcher)
        try:
            for rank in ranks:
                descriptors, terminal = (rank.connection.fileno(), *rank.outputs), rank.has_terminal
                self._tell(descriptors, rank=rank.rank, pid=rank.pid, has_terminal=terminal)
            self._tell([guardian.lifeline], guardian=guardian.pid)
            # The launcher adopts the ranks when this process ends: not before it knows them.
            self.line.recv(len(_READ))
        except OSError:  # the launcher has ended, or needs them no more
            kill_ranks(ranks)
            guardian.dismiss()
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
