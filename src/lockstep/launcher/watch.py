"""The ranks of this host while they run: their output, their reports and exits, and their end."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from lockstep.deadline import Deadline
from lockstep.launcher import processes
from lockstep.launcher.failures import Failure, JobOutcome, failure_outcome
from lockstep.launcher.job import FAILURE_GRACE_SECONDS, GRACE_SECONDS, Job
from lockstep.launcher.output import Console
from lockstep.launcher.processes import (
    AT_ONCE,
    JUDGE,
    TELL,
    Escalation,
    after_failure,
    after_failure_at_once,
    after_signal,
)
from lockstep.launcher.rank_process import RankProcess
from lockstep.launcher.restarts import START_AGAIN
from lockstep.launcher.stacks import dump, main_stack, place_in
from lockstep.launcher.starting import StartOfMany
from lockstep.printable import signal_name
from lockstep.run_status import RunStatus

if TYPE_CHECKING:  # it imports torch
    from lockstep.launcher.hosts import Host

_READ_BYTES = 1 << 16
_POLL_SECONDS = 0.1
_MOST_DRAINS = 100  # each empties a pipe
_REPORT_SECONDS = 3.0  # for a rank that has left others to tell why
_PLACES_SECONDS = 1.0  # in which ranks are asked where they are


class Watch:
    """Passes on the ranks' output and takes in their reports, until the last has ended.

    Args:
        job: What is run.
        host: Where the ranks are.
        ranks: They wait to begin.
        console: Where their output goes.
        signals: Those that come to this process.
        status: What the ranks do.
    """

    def __init__(
        self,
        job: Job,
        host: Host,
        ranks: list[RankProcess],
        console: Console,
        signals: processes.SignalPipe,
        status: RunStatus,
    ) -> None:
        self._job, self._host, self._ranks = job, host, ranks
        self.console, self.signals, self._status = console, signals, status
        self._spare: set[int] = set()  # children that aren't to be ended with the ranks
        self._when_failed: Callable[[], bool] = lambda: False
        self._is_quick = False  # whether the ranks are ended at once, to be started again
        self._interrupted_by: int | None = None  # the signal that ended the launcher
        self._interrupted_at = 0.0
        self.is_hurried = False  # whether Ctrl-C came once more
        self._peer_failed = False  # whether the ranks of another host failed first
        self._escalation: Escalation | None = None  # None as long as all goes well
        self._reports: Deadline | None = None  # for ranks that others tell of to tell themselves
        self._kept = set[int]()  # signals for which no rank has a handler yet
        self._selector = selectors.DefaultSelector()
        # Pipes that aren't read until the stream to which they go (1 or 2) has taken more.
        self._paused: dict[int, tuple[int, Callable[[], object]]] = {}
        self._is_draining = False
        self.when_readable(self.signals.fileno(), self.signals.pull)
        if job.caller is not None:
            self.when_readable(job.caller, self._lose_caller)
        if host.notice is not None:
            self.when_readable(host.notice, self._follow_peer)
        for rank in ranks:
            self.when_readable(rank.connection, rank.read_report)
            for destination, output in enumerate(rank.outputs, start=1):
                self.when_readable(output, partial(self._copy, rank, output, destination))

    @property
    def _grace_seconds(self) -> float:
        given = self._job.grace_seconds
        return GRACE_SECONDS if given is None else given

    @property
    def _failure_grace_seconds(self) -> float:
        # A failure ends the run within seconds, however long a checkpoint takes at its own end.
        return min(FAILURE_GRACE_SECONDS, self._grace_seconds)

    def run(
        self,
        start: StartOfMany,
        spare: set[int],
        when_failed: Callable[[], bool] = lambda: False,
    ) -> None:
        """Let the ranks begin, and watch them until all have ended. However it ends, they do.

        Args:
            start: What is said while they begin.
            spare: Children of this process that aren't to be ended with the ranks; it may grow.
            when_failed: Called at the first sign of a failure; returns whether the ranks are to be
                started again. If so, the others are ended at once.
        """
        self._start, self._spare, self._when_failed = start, spare, when_failed
        try:
            for rank, environment in zip(self._ranks, self._host.environments, strict=True):
                rank.begin(environment)
            self._until_all_ended()
        finally:
            self._end_all()

    def outcome(self) -> JobOutcome:
        """How the ranks of this host have ended."""
        failures = self._failures()
        if self._have_saved() and all(failure.lost_a_peer for failure in failures):
            return self._saved()
        suspects = [rank.with_last_words(rank.suspect) for rank in self._ranks if rank.suspect]
        if failures and all(failure.lost_a_peer for failure in failures):
            failures += suspects
        if failures:
            return self._outcome_of(failures)
        number = self._interrupted_by
        if self._peer_failed or number is None:  # the peer's host tells of it
            results = tuple(r.result for r in self._ranks if r.result is not None)
            return JobOutcome(0, results, suspect=self._outcome_of(suspects) if suspects else None)
        if number == signal.SIGPIPE:  # as every program in a pipe that nobody reads from
            return JobOutcome(128 + number, at_seconds=self._interrupted_at)
        message = f"ended by {signal_name(number)}; no rank is left running."
        return JobOutcome(128 + number, message=message, at_seconds=self._interrupted_at)

    def _have_saved(self) -> bool:
        return any(rank.has_saved() for rank in self._ranks)

    def _saved(self) -> JobOutcome:
        by = "" if self._interrupted_by is None else f" by {signal_name(self._interrupted_by)}"
        message = f"stopped{by} and saved. Give the same command again to go on from there."
        return JobOutcome(START_AGAIN, message=message, at_seconds=time.monotonic())

    def _outcome_of(self, failures: list[Failure]) -> JobOutcome:
        return failure_outcome(
            failures,
            self._host.world_size,
            ended_well=[rank.rank for rank in self._ranks if rank.has_ended_well()],
            full_traceback=self._job.full_traceback,
            places={rank.rank: rank.place for rank in self._ranks if rank.place},
        )

    def _failures(self) -> list[Failure]:
        found = [rank.failure_unless_asked() for rank in self._ranks if not rank.has_saved()]
        return [failure for failure in found if failure is not None]

    def _until_all_ended(self) -> None:
        while any(rank.is_running for rank in self._ranks):
            left = None if self._reports is None else self._reports.left()
            if self._escalation is not None:
                self._note_exits()  # a rank that has ended by itself isn't asked to
                now = time.monotonic()
                for number in self._escalation.take(now):
                    self._act(number, self._escalation, now)
                left = self._escalation.seconds_left(now)
                if left is None:
                    return  # even SIGKILL doesn't end a rank that hangs in the kernel
            self._serve(left)
            self._note_exits()
            if self._escalation is None and self._is_to_end():
                self._note_stops()
                self._note_places()
                self._escalation = Escalation(self._after_failure())

    def _is_to_end(self) -> bool:
        """Whether ranks have failed, or saved, and none is about to tell of an earlier failure.

        That is one of which others say that it is gone, and which runs: it left them, as when its
        time was up, and has told nobody why. Shown by test_a_rank_that_others_lost_may_tell_why.
        """
        failures = self._failures()
        if not failures or self._have_saved():
            return self._have_saved()
        told_of = {rank for failure in failures for rank in failure.told_of}
        told_of -= {failure.rank for failure in failures}
        if all(failure.lost_a_peer for failure in failures) and any(
            rank.is_running and rank.failure is None for rank in self._ranks if rank.rank in told_of
        ):
            self._reports = self._reports or Deadline(_REPORT_SECONDS)
            return not self._reports.left()
        return True

    def _after_failure(self) -> list[processes.Action]:
        if not self._failures():  # one has saved, and the others are to come to their ends as well
            return after_failure(self._grace_seconds)
        if self._when_failed():
            self._is_quick = True
            return after_failure_at_once()
        return after_failure(self._failure_grace_seconds)

    def _act(self, number: int, escalation: Escalation, now: float) -> None:
        if number == TELL:
            self._tell_who_runs(escalation.seconds_to_kill(now))
        elif number == JUDGE:
            for rank in self._ranks:
                rank.note_ending()
            if not all(failure.lost_a_peer for failure in self._failures()):
                escalation.skip()
        else:
            self._send(number)

    def _send(self, number: int) -> None:
        for rank in self._ranks:
            rank.note_ending()
            # A rank that has reported a failure is running its exit handlers: let it.
            is_failing = rank.failure is not None
            if rank.is_running and not (is_failing and number == signal.SIGTERM):
                rank.asked |= not is_failing
                rank.send(number)

    def _serve(self, seconds: float | None) -> bool:
        """Handle events, after waiting at most ``seconds`` for one; return whether any came."""
        nexts = seconds, self.console.draw(), self._start.seconds_left(), self.console.check()
        self._resume()
        for number in [*self._kept]:
            self._pass_on(number)
        times = [each for each in nexts if each is not None]
        if self._kept:
            times.append(_POLL_SECONDS)
        if self.signals.pending:  # they came when nobody waited for them
            times.append(0.0)
        events = self._selector.select(min(times, default=None))
        self._start.tell(self.console.say)
        for key, _ in events:
            if key.data():
                self._selector.unregister(key.fileobj)
        while self.signals.pending:
            number = self.signals.pending.pop(0)
            (self._end if self.signals.is_ending(number) else self._pass_on)(number)
        if self.console.broken and self._interrupted_by is None:
            self._end(signal.SIGPIPE)
        return bool(events)

    def when_readable(self, source: int | socket.socket, act: Callable[[], object]) -> None:
        """Call ``act()`` whenever ``source`` is readable, until it returns True."""
        self._selector.register(source, selectors.EVENT_READ, act)

    def _resume(self) -> None:
        """Read the outputs again that are to be, in the end all."""
        for output, (destination, act) in [*self._paused.items()]:
            if self._is_draining or not self.console.is_full(destination):
                del self._paused[output]
                self.when_readable(output, act)

    def _copy(self, rank: RankProcess, output: int, destination: int) -> bool:
        if self.console.is_full(destination) and not self._is_draining:
            self._paused[output] = destination, partial(self._copy, rank, output, destination)
            return True
        data = os.read(output, _READ_BYTES)
        if destination == 2:
            rank.keep_last_words(data)
        self.console.feed(rank.rank, destination, data, show_prompt=rank.has_terminal)
        return not data

    def _lose_caller(self) -> bool:
        self.console.broken = True  # the caller was the reader of the output, too
        return True

    def _follow_peer(self) -> None:
        assert self._host.notice is not None
        number = os.read(self._host.notice, 1)[0]
        if number == signal.SIGKILL:  # Ctrl-C came there once more
            self._escalation = Escalation(AT_ONCE)
        elif number:  # the launcher of another host was interrupted: all are
            if self._interrupted_by is None:
                self._end(number)
        elif self._escalation is None:
            self._peer_failed = True
            self._note_stops()
            actions = after_signal(signal.SIGTERM, self._failure_grace_seconds)
            if self._when_failed():
                self._is_quick, actions = True, AT_ONCE
            self._escalation = Escalation(actions)

    def _end(self, number: int) -> None:
        """End the ranks because of a signal or, SIGPIPE, because nobody reads the output.

        Ctrl-C while they are ending, or anything after it, ends them at once. But schedulers send
        SIGTERM more than once, or to the caller of launch() as well, whose end is noticed here.
        """
        is_first, was_ctrl_c = self._escalation is None, self._interrupted_by == signal.SIGINT
        if self._interrupted_by is None:
            self._interrupted_by, self._interrupted_at = number, time.monotonic()
            self._host.interrupt(number)
        self.console.hasten()
        if is_first:
            self._escalation = Escalation(after_signal(number, self._grace_seconds))
        elif number == signal.SIGINT or was_ctrl_c:
            self._escalation = Escalation(AT_ONCE)
            self.is_hurried = True
            self._host.hurry()

    def _pass_on(self, number: int) -> None:
        """Send the signal to the ranks that have a handler for it; it would end the others.

        Where ranks are started again it is kept until one has: they may be about to get there, or
        those of the next attempt may.
        """
        running = [rank for rank in self._ranks if rank.is_running]
        able = [rank for rank in running if processes.expects(rank.pid, number)]
        for rank in able:
            rank.send(number)
        if not running:
            return
        if able:
            self._kept.discard(number)
        elif number not in self._kept:
            came = f"{signal_name(number)} came, and no rank has a handler for it: "
            if self._job.restarts:
                self._kept.add(number)
                self.console.say(f"{came}it is kept until one has.")
            else:
                self.console.say(f"{came}nothing is done.")

    def _tell_who_runs(self, seconds: float) -> None:
        running = ", ".join(str(rank.rank) for rank in self._ranks if rank.is_running)
        self.console.say(
            f"still running after {signal_name(self._interrupted_by or signal.SIGTERM)}: rank "
            f"{running}. What is left in {seconds:.0f} s is killed (--grace), or at once by Ctrl-C."
        )

    def _note_exits(self) -> None:
        if self.signals.child_ended:
            self.signals.child_ended = False
            # Orphans that this process has adopted would stay zombies.
            for pid in {*processes.children()} - {rank.pid for rank in self._ranks} - self._spare:
                processes.reap(pid, wait=False)
        for rank in self._ranks:
            was_running = rank.is_running
            rank.note_exit()
            if was_running and not rank.is_running and rank.failure is None:
                self._tell_of_end(rank)

    def _tell_of_end(self, rank: RankProcess) -> None:
        """Ranks may wait for one to come to init(), for as long as they have."""
        others_run = self._host.is_one_of_several or self.are_running()
        if self._escalation is None and others_run:
            self._host.tell_of_end(rank.rank)

    def _note_stops(self) -> None:
        for rank in self._ranks:
            rank.note_stop()

    def _note_places(self) -> None:
        """Note where ranks of this host are that didn't come to where others waited for them."""
        missed = {rank for failure in self._failures() for rank in failure.missed}
        by_pid = {rank.pid: rank for rank in self._ranks if rank.is_running and rank.rank in missed}
        deadline = Deadline(_PLACES_SECONDS)
        for shown in self._status.ranks if by_pid else ():
            rank = by_pid.get((state := shown.read(with_values=False)).pid)
            if rank is not None and deadline.left() and not processes.is_stopped(rank.pid):
                rank.place = str(place_in(main_stack(dump(state, deadline.left()))) or "")

    @property
    def interrupted_by(self) -> int | None:
        """The signal that ended the run, if one did."""
        return self._interrupted_by

    def are_running(self) -> bool:
        """Whether a rank is left that even SIGKILL hasn't ended."""
        return any(rank.is_running for rank in self._ranks)

    def close(self) -> None:
        """Close what the ranks' output and reports came through, and leave signals for the next."""
        self.signals.pending += self._kept
        self._selector.close()
        for rank in self._ranks:
            rank.close()

    def _end_all(self) -> None:
        """End the ranks and the processes that they have started."""
        for rank in self._ranks:
            if rank.is_running:
                rank.send(signal.SIGKILL)
        processes.sweep(self._spare, at_once=self._is_quick)
        self._drain()
        for rank in self._ranks:
            processes.reap(rank.pid, wait=False)  # the kernel may hang in one that was killed

    def _drain(self) -> None:
        """Show the output left in the pipes, without waiting for processes that hold them open."""
        self._is_draining = True
        for _ in range(_MOST_DRAINS):
            if not self._serve(0.0):
                break
        failures = (rank.failure for rank in self._ranks)
        self.console.close({f.rank: f.told.full for f in failures if f and f.told})
        if not self._is_quick:
            self.console.wait()
        if self.console.broken and self._interrupted_by is None:
            self._end(signal.SIGPIPE)
