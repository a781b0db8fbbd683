"""The ranks of this host as their launcher has them: forked, let begin, asked to end, ended."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from lockstep.errors import LaunchError
from lockstep.launcher import processes
from lockstep.launcher.failures import Failure, JobOutcome, RankEnded, Silent, how
from lockstep.launcher.job import Job
from lockstep.launcher.rank import LENGTH_BYTES, run_rank
from lockstep.launcher.restarts import START_AGAIN
from lockstep.launcher.starting import StartOfMany
from lockstep.run_status import RunStatus

_LAST_WORDS_BYTES = 8192


@dataclass
class RankProcess:
    """A rank, as the supervisor sees it."""

    rank: int
    pid: int
    connection: socket.socket  # its environment goes out, its Failure or result comes in
    outputs: Sequence[int]  # descriptors of its stdout and stderr; empty if not labelled
    # Whether it reads from the terminal. It then is in the supervisor's process group, to which
    # the terminal belongs, and not in one of its own.
    has_terminal: bool
    wants_result: bool = False  # whether it runs a function
    is_running: bool = True  # until its exit is known
    asked: bool = False  # whether the launcher asked it to end before it failed
    is_through: bool = False  # whether it reported the end of its program, before exit handlers
    failure: Failure | None = None  # by its own report or else by its exit
    suspect: Failure | None = None  # to blame if others have lost it, or waited for it
    place: str = ""  # where it was when others had waited for it in vain
    result: bytes | None = None  # of its function, pickled
    _received: bytearray = field(default_factory=bytearray)
    _stderr: bytes = b""

    def begin(self, environment: Mapping[str, str]) -> None:
        """Let the rank begin, with these variables added to its environment."""
        self.rank = int(environment["RANK"])
        with contextlib.suppress(BrokenPipeError):  # it was killed
            self.connection.sendall(json.dumps(environment).encode() + b"\n")
        # It is read when the rank has ended, too: then there may be nothing to read.
        self.connection.setblocking(False)

    def send(self, number: int) -> None:
        """Send the signal ``number`` to the rank or, if it can't be handled, its process group.

        What the rank has started, such as a loader's workers, may be needed while it ends well. A
        rank that is stopped goes on, to end: it can't handle a signal before.
        """
        if number == signal.SIGKILL and not self.has_terminal:
            processes.send_signal(-self.pid, number)
            return
        # Ctrl-C was sent to the whole group: a second one would interrupt its handling. The
        # terminal may be gone, though.
        if number == signal.SIGINT and self.has_terminal:
            with contextlib.suppress(OSError):
                if os.tcgetpgrp(0) == os.getpgrp():
                    return
        processes.send_signal(self.pid, number)
        if number in processes.ENDING_SIGNALS and processes.is_stopped(self.pid):
            processes.send_signal(self.pid, signal.SIGCONT)

    def keep_last_words(self, words: bytes) -> None:
        """Keep the end of the rank's stderr, to which ``words`` are added."""
        self._stderr = (self._stderr + words)[-_LAST_WORDS_BYTES:]

    def failure_unless_asked(self) -> Failure | None:
        """The rank's failure, with the end of its stderr; None if it was asked to end."""
        if self.failure is None or self.asked:
            return None
        return self.with_last_words(self.failure)

    def with_last_words(self, failure: Failure) -> Failure:
        """``failure`` of this rank, with the end of its stderr."""
        return replace(failure, last_words=self._stderr.decode(errors="replace").rstrip("\n"))

    def has_ended_well(self) -> bool:
        """Whether its program has come to its end, and not because it was asked to."""
        if self.is_through:  # it may be ended while it runs exit handlers
            return self.failure is None or self.asked
        return self.failure is None and not self.is_running and not self.asked

    def has_saved(self) -> bool:
        """Whether it has stopped because it was asked to, by whomever, and saved its state."""
        return self.failure is not None and self.failure.exit_code == START_AGAIN

    def close(self) -> None:
        """Close what its output and reports came through."""
        self.connection.close()
        for output in self.outputs:
            os.close(output)

    def note_exit(self) -> None:
        """Note how the rank ended, if it has."""
        if self.is_running and (code := processes.exit_code_of_child(self.pid)) is not None:
            now = time.monotonic()
            self.read_report()
            self.end(code, now)

    def note_ending(self) -> None:
        """Note a crash of the rank before the kernel has ended it: a core file takes long."""
        if not self.is_running or self.asked:
            return
        number = processes.ending_signal(self.pid)
        if number and number not in processes.ENDING_SIGNALS:  # those the launcher gets as well
            self.read_report()
            failure = Failure(self.rank, time.monotonic(), 128 + number, signal=number)
            self.failure = self.failure or failure

    def note_stop(self) -> None:
        """Note whether the rank is stopped while others have failed, maybe as it didn't come."""
        if self.is_running and not self.asked and processes.is_stopped(self.pid):
            self.suspect = Failure(self.rank, time.monotonic(), 1, silent=Silent.STOPPED)

    def end(self, code: int, at_seconds: float) -> None:
        """Note the rank's exit code, or minus the number of the signal that ended it."""
        self.is_running = False
        if self.failure is not None:
            return
        if code < 0:
            self.failure = Failure(self.rank, at_seconds, 128 - code, signal=-code)
        elif code or (self.wants_result and self.result is None):
            self.failure = Failure(self.rank, at_seconds, code or 1)
            self.failure = replace(self.failure, silent=None if code else Silent.BY_ITSELF)
        elif not self.is_through and not self.asked:
            self.suspect = Failure(self.rank, at_seconds, 1, silent=Silent.BY_ITSELF)

    def read_report(self) -> bool:
        """Read the reports that the rank and its forks have sent; tell whether no more can come."""
        while self.failure is None and self.result is None:
            end = LENGTH_BYTES + int.from_bytes(self._received[:LENGTH_BYTES], "little")
            if len(self._received) >= end:
                self.failure, self.result = pickle.loads(self._received[LENGTH_BYTES:end])
                self.is_through = self.failure is None
                del self._received[:end]
                continue
            try:
                data = self.connection.recv(1 << 20)
            except BlockingIOError:
                return False
            except ConnectionResetError:  # it was killed before it had read its environment
                return True
            if not data:
                return True
            self._received += data
        return True


def fork_ranks(
    job: Job,
    signal_mask: Collection[int],
    status: RunStatus,
    start: StartOfMany,
    supervisor: int,
    *,
    private: Sequence[Sequence[int]] = (),
) -> list[RankProcess] | Callable[[], int]:
    """Fork the ranks of this host, which wait until :meth:`RankProcess.begin`; return them.

    In a rank, return what to call there, once the stack is back to where no ``finally`` of the
    supervisor's follows. ``signal_mask`` are the signals that a rank blocks, once it has handlers;
    ``supervisor`` is the process that they are children of when they begin. ``private`` are
    descriptors of each rank's own, which the others close.

    Raises:
        LaunchError: If a limit on processes or descriptors is reached. None is left behind.
    """
    started: list[RankProcess] = []
    is_call = isinstance(job.program, bytes)
    for rank in range(job.num_ranks):
        try:
            connection, of_rank = socket.socketpair()
            pipes = [os.pipe() for _ in range(2 if job.labelled else 0)]
            processes.flush_standard_streams()
            pid = processes.fork()
        except OSError as error:
            kill_ranks(started)
            raise LaunchError(
                f"Rank {rank} can't be started: {error.strerror}. {len(started)} of "
                f"{job.num_ranks} ranks were, and have been ended. Ask for fewer ranks, or raise "
                "the limit on processes (ulimit -u) or open files (ulimit -n)."
            ) from error
        has_terminal = rank == job.stdin_rank and os.isatty(0)
        if not has_terminal:
            # On both sides: whichever is first, the group exists before it is needed.
            with contextlib.suppress(OSError):
                os.setpgid(pid, pid)
        outputs = [reading for reading, _ in pipes]
        started.append(RankProcess(rank, pid, connection, outputs, has_terminal, is_call))
        if pid == 0:
            for process in started:
                process.connection.close()
                for output in process.outputs:
                    os.close(output)
            for number, descriptors in enumerate(private):
                for descriptor in descriptors if number != rank else ():
                    os.close(descriptor)
            outputs = [writing for _, writing in pipes]
            shown = status.ranks[rank]
            return partial(run_rank, job, supervisor, of_rank, outputs, signal_mask, shown)
        of_rank.close()
        for _, writing in pipes:
            os.close(writing)
        start.note_process(len(started))
    return started


@contextlib.contextmanager
def none_ended(ranks: Sequence[RankProcess]) -> Iterator[None]:
    """Raise RankEnded in the main thread as soon as one of these ranks ends, which wait to begin.

    It then waits for other hosts, in a call that may take long.
    """

    def look(*_: object) -> None:
        for rank in ranks:
            rank.note_exit()
            if (failure := rank.failure or rank.suspect) is not None:
                raise RankEnded(JobOutcome(failure.exit_code, message=how(failure)), rank.rank)

    before = signal.signal(signal.SIGCHLD, look)
    try:
        look()
        yield
    finally:
        signal.signal(signal.SIGCHLD, before)


def kill_ranks(ranks: Sequence[RankProcess]) -> None:
    """End the ranks at once, and leave no zombie."""
    for process in ranks:
        process.send(signal.SIGKILL)
        processes.reap(process.pid)
