"""Fork the ranks; a rank's process as the supervisor sees it: pipes, report and exit."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import socket
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from lockstep.errors import LaunchError
from lockstep.launcher.failures import Failure
from lockstep.launcher.job import Job
from lockstep.launcher.processes import (
    exit_code_of_child,
    flush_standard_streams,
    fork,
    reap,
    send_signal,
)
from lockstep.launcher.rank import REPORT_LENGTH_BYTES, RankStart

_LAST_WORDS_BYTES = 8192


@dataclass
class RankProcess:
    """A rank, as the supervisor sees it."""

    rank: int
    pid: int
    connection: int  # descriptor of the socket of :class:`RankStart`
    outputs: Sequence[int]  # descriptors of its stdout and stderr; empty if not labelled
    wants_result: bool  # whether it runs a function
    # Whether it reads from the terminal. It then is in the supervisor's process group, to which
    # the terminal belongs, and not in one of its own.
    has_terminal: bool
    is_running: bool = True  # until its exit is known
    asked: bool = False  # whether the launcher asked it to end before it failed
    failure: Failure | None = None  # by its own report or else by its exit
    result: bytes | None = None  # of its function, pickled
    _received: bytearray = field(default_factory=bytearray)
    _stderr: bytes = b""

    def begin(self, environment: Mapping[str, str]) -> None:
        """Let it begin, with these variables added to its environment."""
        self.rank = int(environment["RANK"])
        with contextlib.suppress(BrokenPipeError):  # it was killed
            os.write(self.connection, json.dumps(environment).encode() + b"\n")
        # It is read when the rank has ended, too: then there may be nothing to read.
        os.set_blocking(self.connection, False)

    def send(self, number: int) -> None:
        """Send the signal ``number`` to it and the processes that it has started."""
        if not self.has_terminal:
            send_signal(-self.pid, number)
            return
        # Ctrl-C was sent to the whole group: a second one would interrupt its handling. The
        # terminal may be gone, though.
        with contextlib.suppress(OSError):
            if number == signal.SIGINT and os.tcgetpgrp(0) == os.getpgrp():
                return
        os.kill(self.pid, number)

    def keep_last_words(self, words: bytes) -> None:
        """Keep the end of its stderr, to which ``words`` are added."""
        self._stderr = (self._stderr + words)[-_LAST_WORDS_BYTES:]

    def failure_unless_asked(self) -> Failure | None:
        """Its failure, with its last words; None if the launcher had asked it to end."""
        if self.failure is None or self.asked:
            return None
        return replace(self.failure, last_words=self._stderr.decode(errors="replace").rstrip("\n"))

    def note_exit(self) -> None:
        """Note how it ended, if it has."""
        if self.is_running and (code := exit_code_of_child(self.pid)) is not None:
            now = time.monotonic()
            self.read_report()
            self.end(code, now)

    def end(self, code: int, at_seconds: float) -> None:
        """Note its exit code, or minus the signal that ended it."""
        self.is_running = False
        if self.failure is not None:
            return
        if code < 0:
            self.failure = Failure(self.rank, at_seconds, 128 - code, signal=-code)
        elif code or (self.wants_result and self.result is None):
            self.failure = Failure(self.rank, at_seconds, code or 1, without_result=not code)

    def read_report(self) -> bool:
        """Read the available part of its report; tell whether more may come."""
        while self.failure is None and self.result is None:
            try:
                data = os.read(self.connection, 1 << 20)
            except BlockingIOError:
                return True
            except ConnectionResetError:  # it was killed before it had read its environment
                return False
            if not data:
                return False
            self._received += data
            start = self._received[:REPORT_LENGTH_BYTES]
            if len(self._received) >= REPORT_LENGTH_BYTES + int.from_bytes(start, "little"):
                report = pickle.loads(self._received[REPORT_LENGTH_BYTES:])
                self._received.clear()
                if isinstance(report, Failure):
                    self.failure = report
                else:
                    self.result = report
        return False


def fork_ranks(job: Job, signal_mask: Collection[int]) -> list[RankProcess] | RankStart:
    """Fork the ranks of this host, which wait until :meth:`RankProcess.begin`.

    It returns the ranks in the supervisor, and a RankStart in each rank. There the caller has to
    return all the way to the interpreter, without any ``finally`` of the supervisor's in between.
    ``signal_mask`` are the signals that a rank blocks, once it has handlers of its own.

    Raises:
        LaunchError: If a limit on processes or descriptors is reached. None is left behind.
    """
    started: list[RankProcess] = []
    for rank in range(job.num_ranks):
        try:
            ours, theirs = socket.socketpair()
            ends = [(ours.detach(), theirs.detach())]
            ends += [os.pipe() for _ in range(2 if job.labelled else 0)]
            flush_standard_streams()
            pid = fork()
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
        (connection, *outputs), (of_rank, *outputs_of_rank) = zip(*ends, strict=True)
        is_rank = pid == 0
        for descriptor in (connection, *outputs) if is_rank else (of_rank, *outputs_of_rank):
            os.close(descriptor)
        if is_rank:
            for process in started:
                for descriptor in (process.connection, *process.outputs):
                    os.close(descriptor)
            return RankStart(of_rank, outputs_of_rank, signal_mask)
        process = RankProcess(
            rank,
            pid=pid,
            connection=connection,
            outputs=outputs,
            wants_result=isinstance(job.program, bytes),
            has_terminal=has_terminal,
        )
        started.append(process)
    return started


def kill_ranks(ranks: Sequence[RankProcess]) -> None:
    """End ranks that haven't begun."""
    for process in ranks:
        process.send(signal.SIGKILL)
        reap(process.pid)
