"""Fork the ranks: one pipe for each of their streams, one for each of their reports."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from lockstep.errors import LaunchError
from lockstep.launcher.output import LineSplitter
from lockstep.launcher.processes import Exit, flush_standard_streams, fork, reap, signal_group
from lockstep.launcher.rank import REPORT_LENGTH_BYTES, RankStart
from lockstep.launcher.verdict import Ending, Report

_LAST_WORDS_BYTES = 8192


@dataclass
class Stream:
    """One of a rank's two output streams, as the supervisor reads it."""

    descriptor: int
    destination: int  # 1 or 2
    splitter: LineSplitter = field(default_factory=LineSplitter)


@dataclass
class RankProcess:
    """A rank, as the supervisor sees it.

    ``asked`` is set when it is asked to end before it has failed or ended; what it does from
    then on is nobody's fault. ``has_terminal`` tells that it reads from the terminal: it then is
    in the supervisor's process group, to which the terminal belongs, not in one of its own.
    """

    rank: int
    pid: int
    streams: tuple[Stream, ...]
    report_descriptor: int
    has_terminal: bool = False
    report_bytes: bytearray = field(default_factory=bytearray)
    report: Report | None = None
    exit: Exit | None = None
    exit_at_seconds: float = 0.0
    asked: bool = False
    last_words: bytes = b""

    @property
    def is_failing(self) -> bool:
        """Whether it has reported a failure, and so is about to end."""
        return self.report is not None and self.report.exit_code != 0

    def send(self, number: int) -> None:
        """Send it the signal ``number``, and those that it has started."""
        if not self.has_terminal:
            signal_group(self.pid, number)
            return
        # Ctrl-C has come to the whole group already: a second one would interrupt its handling.
        # The terminal may be gone, though.
        with contextlib.suppress(OSError):
            if number == signal.SIGINT and os.tcgetpgrp(0) == os.getpgrp():
                return
        os.kill(self.pid, number)

    def hear(self, words: bytes) -> None:
        """Remember ``words``, which it wrote to stderr, if they prove to be its last."""
        self.last_words = (self.last_words + words)[-_LAST_WORDS_BYTES:]

    def ending(self, *, wants_result: bool) -> Ending:
        """All that is known of how it ended, or is ending."""
        code, number = self.exit if self.exit is not None else (None, None)
        has_result = self.report is not None and self.report.result is not None
        return Ending(
            self.rank,
            self.exit_at_seconds,
            exit_code=code,
            signal=number,
            report=self.report,
            asked=self.asked,
            without_result=wants_result and self.exit is not None and not has_result,
            last_words=self.last_words.decode(errors="replace").rstrip("\n"),
        )


@dataclass(frozen=True)
class _Pipes:
    """The pipes of one rank, each as (read end, write end)."""

    report: tuple[int, int]
    outputs: tuple[tuple[int, int], ...]  # stdout, stderr; none if they aren't labelled

    @classmethod
    def open(cls, *, labelled: bool) -> _Pipes:
        return cls(os.pipe(), (os.pipe(), os.pipe()) if labelled else ())

    def read_ends(self) -> list[int]:
        return [pipe[0] for pipe in (self.report, *self.outputs)]

    def write_ends(self) -> list[int]:
        return [pipe[1] for pipe in (self.report, *self.outputs)]


def fork_ranks(
    ranks: Sequence[int],
    environments: Sequence[Mapping[str, str]],
    *,
    num_threads: int,
    labelled: bool,
    stdin_rank: int | None,
    not_the_ranks: Sequence[int],
    signal_mask: Collection[int],
) -> list[RankProcess] | RankStart:
    """Fork a process for each of ``ranks``.

    It returns once in the supervisor and once in each rank. In a rank the caller has to return
    all the way to the interpreter, without any ``finally`` of the supervisor's in between.

    Args:
        ranks: The numbers of the ranks.
        environments: The variables to add to each one's environment.
        num_threads: How many threads each computes with.
        labelled: Whether their output comes through pipes.
        stdin_rank: The rank that reads the supervisor's standard input, or None.
        not_the_ranks: Descriptors of the supervisor that ranks must not hold open.
        signal_mask: What the ranks shall block, once they are themselves.

    Returns:
        In the supervisor the ranks; in a rank what it begins with.

    Raises:
        LaunchError: If there cannot be so many processes or pipes. None is left behind.
    """
    started: list[RankProcess] = []
    for rank, environment in zip(ranks, environments, strict=True):
        try:
            pipes = _Pipes.open(labelled=labelled)
            flush_standard_streams()
            pid = fork()
        except OSError as error:
            _abandon(started)
            raise LaunchError(
                f"Rank {rank} can't be started: {error.strerror}. {len(started)} of {len(ranks)} "
                "ranks were, and have been ended. Ask for fewer ranks, or raise the limit on "
                "processes (ulimit -u) or open files (ulimit -n)."
            ) from error
        has_terminal = rank == stdin_rank and os.isatty(0)
        if not has_terminal:
            # Both sides do it: whichever comes first, the group is there before anyone needs it.
            with contextlib.suppress(OSError):
                os.setpgid(pid, pid)
        if pid == 0:
            others = [fd for process in started for fd in _descriptors(process)]
            for descriptor in (*pipes.read_ends(), *others, *not_the_ranks):
                os.close(descriptor)
            stdout, stderr = (pipe[1] for pipe in pipes.outputs) if labelled else (None, None)
            stdin, report = rank == stdin_rank, pipes.report[1]
            return RankStart(
                rank, environment, num_threads, stdin, stdout, stderr, report, signal_mask
            )
        started.append(_supervised(rank, pid, pipes, has_terminal))
    return started


def _supervised(rank: int, pid: int, pipes: _Pipes, has_terminal: bool) -> RankProcess:
    for descriptor in pipes.write_ends():
        os.close(descriptor)
    # It is also read when a rank has ended: then there may be nothing to read.
    os.set_blocking(pipes.report[0], False)
    streams = tuple(Stream(pipe[0], number) for number, pipe in enumerate(pipes.outputs, start=1))
    return RankProcess(rank, pid, streams, pipes.report[0], has_terminal)


def _descriptors(process: RankProcess) -> list[int]:
    return [process.report_descriptor, *(stream.descriptor for stream in process.streams)]


def _abandon(started: list[RankProcess]) -> None:
    for process in started:
        process.send(signal.SIGKILL)
        reap(process.pid)


def read_report(process: RankProcess) -> bool:
    """Read what there is of a rank's report; tell whether there may be more to come."""
    while process.report is None:
        try:
            data = os.read(process.report_descriptor, 1 << 20)
        except BlockingIOError:
            return True
        if not data:
            return False
        process.report_bytes += data
        _parse(process)
    return False


def _parse(process: RankProcess) -> None:
    received = process.report_bytes
    length = int.from_bytes(received[:REPORT_LENGTH_BYTES], "little")
    if len(received) >= REPORT_LENGTH_BYTES + length:
        process.report = pickle.loads(memoryview(received)[REPORT_LENGTH_BYTES:])
        process.report_bytes = bytearray()
