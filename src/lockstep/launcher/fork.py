"""Fork the ranks; a rank's process as the supervisor sees it: pipes, report and exit."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
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
    outputs: Sequence[int]  # descriptors of its stdout and stderr; empty if not labelled
    report_descriptor: int
    wants_result: bool  # whether it runs a function
    # Whether it reads from the terminal. It then is in the supervisor's process group, to which
    # the terminal belongs, and not in one of its own.
    has_terminal: bool
    _report_bytes: bytearray = field(default_factory=bytearray)
    _stderr: bytes = b""

    @property
    def is_running(self) -> bool:
        """Whether its exit isn't known yet."""
        return self.exit_code is None and self.signal is None

    def descriptors(self) -> list[int]:
        """The supervisor's ends of its pipes."""
        return [self.report_descriptor, *self.outputs]

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
                data = os.read(self.report_descriptor, 1 << 20)
            except BlockingIOError:
                return True
            if not data:
                return False
            received = self._report_bytes
            received += data
            length = int.from_bytes(received[:REPORT_LENGTH_BYTES], "little")
            if len(received) >= REPORT_LENGTH_BYTES + length:
                self.report = pickle.loads(memoryview(received)[REPORT_LENGTH_BYTES:])
                self._report_bytes = bytearray()
        return False


def fork_ranks(
    job: Job,
    ranks: Sequence[int],
    environments: Sequence[Mapping[str, str]],
    *,
    private: Sequence[int],
    signal_mask: Collection[int],
) -> list[RankProcess] | RankStart:
    """Fork a process for each of ``ranks``, of this host, with its ``environments``.

    It returns the ranks in the supervisor, and a RankStart in each rank. There the caller has to
    return all the way to the interpreter, without any ``finally`` of the supervisor's in between.
    ``private`` are descriptors of the supervisor that ranks must not hold open; ``signal_mask``
    are the signals that a rank blocks, once it has handlers of its own.

    Raises:
        LaunchError: If a limit on processes or descriptors is reached. None is left behind.
    """
    started: list[RankProcess] = []
    for rank, environment in zip(ranks, environments, strict=True):
        try:
            pipes = [os.pipe() for _ in range(3 if job.labelled else 1)]
            flush_standard_streams()
            pid = fork()
        except OSError as error:
            for process in started:
                process.send(signal.SIGKILL)
                reap(process.pid)
            raise LaunchError(
                f"Rank {rank} can't be started: {error.strerror}. {len(started)} of {len(ranks)} "
                "ranks were, and have been ended. Ask for fewer ranks, or raise the limit on "
                "processes (ulimit -u) or open files (ulimit -n)."
            ) from error
        has_terminal = rank == job.stdin_rank and os.isatty(0)
        if not has_terminal:
            # On both sides: whichever is first, the group exists before it is needed.
            with contextlib.suppress(OSError):
                os.setpgid(pid, pid)
        (report, *outputs), (write_report, *write_outputs) = zip(*pipes, strict=True)
        if pid == 0:
            others = [fd for process in started for fd in process.descriptors()]
            for descriptor in (report, *outputs, *others, *private):
                os.close(descriptor)
            return RankStart(rank, environment, write_outputs, write_report, signal_mask)
        for descriptor in (write_report, *write_outputs):
            os.close(descriptor)
        # It is read when the rank has ended, too: then there may be nothing to read.
        os.set_blocking(report, False)
        process = RankProcess(
            rank,
            pid=pid,
            outputs=outputs,
            report_descriptor=report,
            wants_result=isinstance(job.program, Call),
            has_terminal=has_terminal,
        )
        started.append(process)
    return started
