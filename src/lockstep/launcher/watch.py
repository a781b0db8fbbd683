"""Watch the ranks of one host until the last has ended, and end them if need be."""

from __future__ import annotations

import os
import selectors
import signal
import time
from collections.abc import Callable, Collection
from types import TracebackType

from lockstep.launcher.console import Console
from lockstep.launcher.escalation import Escalation, after_failure, after_signal, at_once
from lockstep.launcher.forking import RankProcess, Stream, read_report
from lockstep.launcher.guardian import Guardian, start_guardian
from lockstep.launcher.job import Call, Job
from lockstep.launcher.peers import Peers
from lockstep.launcher.processes import children, exit_of, reap, sweep
from lockstep.launcher.signals import SignalPipe
from lockstep.launcher.verdict import Ending

_READ_BYTES = 1 << 16
_DRAIN_SECONDS = 2.0
_SWEEP_SECONDS = 1.0


class Watch:
    """The ranks that were started, until none is left.

    It is a context manager: however its block ends, the ranks and what they started end too.

    Args:
        job: What they run.
        ranks: Their processes.
        mark: By which the guardian finds what they start.
        spare: Children of this process that it didn't start for the ranks.
        console: Where their output goes.
        signals: Where signals arrive.
    """

    def __init__(
        self,
        job: Job,
        ranks: list[RankProcess],
        mark: str,
        spare: Collection[int],
        console: Console,
        *,
        signals: SignalPipe,
    ) -> None:
        self.interrupted_by: int | None = None  # the signal that ended the launcher
        self.peer_failed = False  # whether the ranks of another host failed first
        self._ranks = ranks
        self._mark = mark
        self._spare = set(spare)
        self._console = console
        self._signals = signals
        self._guardian: Guardian | None = None
        self._grace_seconds = job.grace_seconds
        self._wants_result = isinstance(job.program, Call)
        self._escalation: Escalation | None = None  # None as long as all goes well
        self._news = 0  # how many exits and reports are known
        self._selector = selectors.DefaultSelector()
        self._listen()

    def __enter__(self) -> Watch:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        groups = [process.pid for process in self._ranks]
        for process in self._ranks:
            if process.exit is None:
                process.send(signal.SIGKILL)
        sweep(spare=self._spare, grace_seconds=_SWEEP_SECONDS)
        self._drain()
        if self._guardian is not None:
            self._guardian.dismiss()
        for group in groups:
            reap(group, wait=False)  # the kernel may be stuck in one that was killed

    def guard(self) -> None:
        """Have the ranks ended even if this process is killed."""
        self._guardian = start_guardian([process.pid for process in self._ranks], self._mark)
        self._spare.add(self._guardian.pid)

    def listen_to_caller(self, lifeline: int | None) -> None:
        """End the ranks when ``lifeline`` has its end-of-file: the caller is gone."""
        if lifeline is not None:
            self._when_readable(lifeline, self._lose_caller)

    def listen_to(self, peers: Peers) -> None:
        """End the ranks when those of another host have failed."""
        peers.listen()
        self._when_readable(peers.fileno(), self._follow_peer)

    def until_all_ended(self) -> None:
        """Pass on output, take in reports and signals, and judge, until all ranks have ended."""
        while any(process.exit is None for process in self._ranks):
            now = time.monotonic()
            self._escalate(now)
            if self._escalation is not None and self._escalation.exhausted(now):
                return  # even SIGKILL doesn't end what the kernel is stuck in
            self._serve(None if self._escalation is None else self._escalation.seconds_left(now))
            if self._note_exits() and self._escalation is None and self._has_failed():
                self._escalation = Escalation(after_failure(self._grace_seconds))

    def endings(self) -> list[Ending]:
        """How each rank has ended, as far as is known."""
        return [process.ending(wants_result=self._wants_result) for process in self._ranks]

    def results(self) -> tuple[bytes, ...]:
        """What each rank's function returned, pickled, in the order of ranks."""
        reports = (process.report for process in self._ranks)
        return tuple(report.result for report in reports if report and report.result is not None)

    def _has_failed(self) -> bool:
        return any(ending.failed for ending in self.endings())

    def _listen(self) -> None:
        register = self._selector.register
        register(self._signals, selectors.EVENT_READ, self._signals.pull)
        for process in self._ranks:
            register(process.report_descriptor, selectors.EVENT_READ, self._reader(process))
            for stream in process.streams:
                register(stream.descriptor, selectors.EVENT_READ, self._copier(process, stream))

    def _serve(self, seconds: float | None) -> bool:
        """Handle what has come, waiting for it at most ``seconds``; tell whether there was any."""
        events = self._selector.select(seconds)
        for key, _ in events:
            key.data()
        while self._signals.pending:
            self._end(self._signals.pending.pop(0))
        if self._console.broken and self.interrupted_by is None:
            self._end(signal.SIGPIPE)
        return bool(events)

    def _copier(self, process: RankProcess, stream: Stream) -> Callable[[], None]:
        def copy() -> None:
            data = os.read(stream.descriptor, _READ_BYTES)
            if not data:
                self._selector.unregister(stream.descriptor)
                os.close(stream.descriptor)
            pieces = stream.splitter.feed(data) if data else stream.splitter.finish()
            if data and process.has_terminal:
                # A prompt has no end of line, and is to be seen.
                pieces += [rest[:-1] for rest in stream.splitter.finish()]
            if stream.destination == 2:
                process.hear(data)
            self._console.show(process, stream, pieces)

        return copy

    def _reader(self, process: RankProcess) -> Callable[[], None]:
        def read() -> None:
            if not read_report(process):
                self._selector.unregister(process.report_descriptor)

        return read

    def _when_readable(self, descriptor: int, act: Callable[[], None]) -> None:
        def act_once() -> None:
            self._selector.unregister(descriptor)
            act()

        self._selector.register(descriptor, selectors.EVENT_READ, act_once)

    def _lose_caller(self) -> None:
        self._console.broken = True  # the caller was the reader of our output, too

    def _follow_peer(self) -> None:
        if self._escalation is None:
            self.peer_failed = True
            self._escalation = Escalation(after_signal(signal.SIGTERM, self._grace_seconds))

    def _end(self, number: int) -> None:
        """The launcher is to end: because of a signal or, SIGPIPE, because nobody listens."""
        ending_already = self._escalation is not None
        self.interrupted_by = self.interrupted_by or number
        steps = at_once() if ending_already else after_signal(number, self._grace_seconds)
        self._escalation = Escalation(steps)

    def _escalate(self, now: float) -> None:
        for number in self._escalation.take(now) if self._escalation is not None else ():
            for process in self._ranks:
                # A rank that has reported a failure is running its exit handlers: let it.
                if process.exit is None and not (process.is_failing and number == signal.SIGTERM):
                    process.asked |= not process.is_failing
                    process.send(number)

    def _note_exits(self) -> bool:
        """See who has ended or reported; tell whether anyone has since the last time."""
        if self._signals.child_ended:
            self._signals.child_ended = False
            # Orphans of the ranks' that this process has been given would stay zombies.
            for pid in {*children()} - {process.pid for process in self._ranks} - self._spare:
                reap(pid, wait=False)
        for process in self._ranks:
            if process.exit is None and (how := exit_of(process.pid)) is not None:
                process.exit, process.exit_at_seconds = how, time.monotonic()
                read_report(process)
        news = sum((p.exit is not None) + (p.report is not None) for p in self._ranks)
        is_new, self._news = news != self._news, news
        return is_new

    def _drain(self) -> None:
        """Show what is still in the pipes, but don't wait for whoever holds them open."""
        deadline = time.monotonic() + _DRAIN_SECONDS
        while time.monotonic() < deadline and self._serve(0.0):
            pass
        for process in self._ranks:
            for stream in process.streams:
                self._console.show(process, stream, stream.splitter.finish())
            report = process.report
            if report is not None and report.told is not None:
                self._console.log(process, report.told.full)
        self._console.finish()
