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
from dataclasses import dataclass, field

from lockstep.errors import LaunchError
from lockstep.launcher.failures import Ending
from lockstep.launcher.job import Call, Job
from lockstep.launcher.processes import exit_of, flush_standard_streams, fork, reap, send_signal
from lockstep.launcher.rank import REPORT_LENGTH_BYTES, RankStart

_LAST_WORDS_BYTES = 8192


@dataclass(kw_only=True)
class RankProcess(Ending):
    """A rank, as the supervisor sees it; ``exit_code`` and ``signal`` are None until it ends."""

    pid: int
    connection: int  # descriptor of a socket: the rank's environment goes out, its Report comes in
    outputs: Sequence[int]  # descriptors of its stdout and stderr; empty if not labelled
    wants_result: bool  # whether it runs a function
    # Whether it reads from the terminal. It then is in the supervisor's process group, to which
    # the terminal belongs, and not in one of its own.
    has_terminal: bool
    _received: bytearray = field(default_factory=bytearray)
    _stderr: bytes = b""

    def begin(self, environment: Mapping[str, str]) -> None:
        """Let it begin, with these variables added to its environment."""
        self.rank = int(environment["RANK"])
        with contextlib.suppress(BrokenPipeError):  # it was killed
            os.write(self.connection, json.dumps(environment).encode() + b"\n")
        # It is read when the rank has ended, too: then there may be nothing to read.
        os.set_blocking(self.connection, False)

    @property
    def is_running(self) -> bool:
        """Whether its exit isn't known yet."""
        return self.exit_code is None and self.signal is None

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
        self.last_words = self._stderr.decode(errors="replace").rstrip("\n")

    def note_exit(self) -> None:
        """Note how it ended, if it has."""
        if self.is_running and (exit := exit_of(self.pid)) is not None:
            self.exit_code, self.signal = exit
            self.at_seconds = time.monotonic()
            self.read_report()
            has_result = self.report is not None and self.report.result is not None
            self.without_result = self.wants_result and not has_result

    def read_report(self) -> bool:
        """Read the available part of its report; tell whether more may come."""
        while self.report is None:
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
                self.report = pickle.loads(memoryview(self._received)[REPORT_LENGTH_BYTES:])
                self._received = bytearray()
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
            wants_result=isinstance(job.program, Call),
            has_terminal=has_terminal,
        )
        started.append(process)
    return started


def kill_ranks(ranks: Sequence[RankProcess]) -> None:
    """End ranks that haven't begun."""
    for process in ranks:
        process.send(signal.SIGKILL)
        reap(process.pid)
