"""The process that starts the ranks of one host, watches them, and leaves none behind.

It imports torch once and forks the ranks: an import takes about a second, a fork a twentieth
of one. A fork copies only the thread that forks, so the ranks are forked first, and wait for their
environments until the store, which has threads, is open and all hosts have met there.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import selectors
import signal
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import NoReturn

from lockstep.errors import LaunchError
from lockstep.launcher import processes
from lockstep.launcher.failures import Failure, Outcome, failure_outcome, signal_name
from lockstep.launcher.fork import RankProcess, fork_ranks, kill_ranks
from lockstep.launcher.job import Job
from lockstep.launcher.output import Console, open_log_files
from lockstep.launcher.processes import Escalation, after_failure, after_signal, at_once
from lockstep.launcher.rank import RankStart, run_rank

_READ_BYTES = 1 << 16
_GRACE_SECONDS = 3.0  # between SIGTERM to a rank and SIGKILL
_DRAIN_SECONDS = 2.0
_SWEEP_SECONDS = 1.0


def main() -> int:
    """Run the job that the command line tells of.

    Returns:
        In a rank, and only there: its exit code. The caller exits with it, so that a rank ends
        as any Python program does. The supervisor has nothing to wait for, and just ends.
    """
    # Until there are ranks there is nothing to do but end, and no traceback to show.
    processes.handle_ending_signals(lambda number, frame: os._exit(128 + number))
    with open(int(sys.argv[2]), "rb") as file:
        job: Job = pickle.load(file)
    del sys.argv[1:]
    if job.caller is not None:
        processes.end_with_parent(job.caller.pid, signal.SIGTERM)
    try:
        return _start(job)
    except LaunchError as error:
        _conclude(job, Outcome(2, message=str(error)))


def _start(job: Job) -> int:
    """Fork the ranks, and either be one, or watch them and end."""
    # The collector finds nothing to free in an import, but looks for it a hundred times.
    gc.disable()
    from lockstep.launcher.hosts import Host, HostOfSeveral  # imports torch, so that no rank has to

    # Frozen objects aren't visited by the ranks' collectors, so their memory stays shared.
    gc.freeze()
    gc.enable()
    supervisor, spare = os.getpid(), processes.children()
    processes.adopt_orphans()
    # Blocked, so that no rank runs the supervisor's handlers.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, processes.ENDING_SIGNALS)
    ranks = fork_ranks(job, mask)
    if isinstance(ranks, RankStart):
        return run_rank(ranks, job, supervisor)
    # From here on this is the supervisor.
    guardian = processes.Guardian([rank.pid for rank in ranks])
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    try:
        host = Host(job) if job.meeting is None else HostOfSeveral(job, job.meeting)
        log_files = open_log_files(job.log_dir, host.ranks)
    except LaunchError:
        kill_ranks(ranks)
        guardian.dismiss()
        raise
    signals = processes.SignalPipe()
    watch = Watch(job, ranks, Console(log_files, signals), signals, {*spare, guardian.pid})
    try:
        watch.run(host.environments, host.notice)
    finally:
        guardian.dismiss()
    outcome = watch.outcome(host.world_size)
    return _conclude(job, host.settle(outcome, signals.is_pending))


def _conclude(job: Job, outcome: Outcome) -> NoReturn:
    """Send ``outcome`` to the caller or, on a command line, print its message; then end."""
    with contextlib.suppress(OSError):  # the caller, or the terminal, may be gone
        if job.caller is not None:
            with open(job.caller.socket, "wb") as connection:
                pickle.dump(outcome, connection)
        elif outcome.message is not None:
            # A lone surrogate has no encoding, and is escaped as in Python's own tracebacks.
            os.write(2, f"lockstep: {outcome.message}\n".encode(errors="backslashreplace"))
    os._exit(outcome.exit_status)


class Watch:
    """Passes on the ranks' output and takes in their reports, until the last has ended.

    ``spare`` are children of this process that aren't to be ended with the ranks.
    """

    def __init__(
        self,
        job: Job,
        ranks: list[RankProcess],
        console: Console,
        signals: processes.SignalPipe,
        spare: Collection[int],
    ) -> None:
        self._job = job
        self._ranks = ranks
        self._spare = set(spare)
        self._console = console
        self._signals = signals
        self._interrupted_by: int | None = None  # the signal that ended the launcher
        self._peer_failed = False  # whether the ranks of another host failed first
        self._escalation: Escalation | None = None  # None as long as all goes well
        self._selector = selectors.DefaultSelector()
        self._when_readable(signals.fileno(), signals.pull)
        if job.caller is not None:
            self._when_readable(job.caller.socket, self._lose_caller)
        for rank in ranks:
            self._when_readable(rank.connection, partial(self._read_report, rank))
            for destination, output in enumerate(rank.outputs, start=1):
                self._when_readable(output, partial(self._copy, rank, output, destination))

    def run(self, environments: Sequence[Mapping[str, str]], notice: int | None) -> None:
        """Let the ranks begin, and watch them until all have ended. However it ends, they do.

        ``notice`` becomes readable when another host has failed.
        """
        try:
            if notice is not None:
                self._when_readable(notice, partial(self._follow_peer, notice))
            for rank, environment in zip(self._ranks, environments, strict=True):
                rank.begin(environment)
            self._until_all_ended()
        finally:
            self._end_all()

    def outcome(self, world_size: int) -> Outcome:
        """The outcome of this host's ranks."""
        if failures := self._failures():
            return failure_outcome(failures, world_size, full_traceback=self._job.full_traceback)
        number = self._interrupted_by
        if self._peer_failed:  # its host tells of it
            return Outcome(0)
        if number is None:
            return Outcome(0, tuple(r.result for r in self._ranks if r.result is not None))
        if number == signal.SIGPIPE:  # as every program in a pipe that nobody reads from
            return Outcome(128 + number)
        message = f"ended by {signal_name(number)}; no rank is left running."
        return Outcome(128 + number, message=message)

    def _failures(self) -> list[Failure]:
        return [failure for rank in self._ranks if (failure := rank.failure_unless_asked())]

    def _until_all_ended(self) -> None:
        while any(rank.is_running for rank in self._ranks):
            now = time.monotonic()
            left = None
            if self._escalation is not None:
                for number in self._escalation.take(now):
                    self._send(number)
                if self._escalation.exhausted(now):
                    return  # even SIGKILL doesn't end a rank that hangs in the kernel
                left = self._escalation.seconds_left(now)
            self._serve(left)
            self._note_exits()
            if self._escalation is None and self._failures():
                self._escalation = Escalation(after_failure(_GRACE_SECONDS))

    def _send(self, number: int) -> None:
        for rank in self._ranks:
            # A rank that has reported a failure is running its exit handlers: let it.
            is_failing = rank.failure is not None
            if rank.is_running and not (is_failing and number == signal.SIGTERM):
                rank.asked |= not is_failing
                rank.send(number)

    def _serve(self, seconds: float | None) -> bool:
        """Handle events, waiting for one at most ``seconds``; tell whether there was any."""
        events = self._selector.select(seconds)
        for key, _ in events:
            key.data()
        while self._signals.pending:
            self._end(self._signals.pending.pop(0))
        if self._console.broken and self._interrupted_by is None:
            self._end(signal.SIGPIPE)
        return bool(events)

    def _when_readable(self, descriptor: int, act: Callable[[], None]) -> None:
        self._selector.register(descriptor, selectors.EVENT_READ, act)

    def _copy(self, rank: RankProcess, output: int, destination: int) -> None:
        data = os.read(output, _READ_BYTES)
        if not data:
            self._selector.unregister(output)
            os.close(output)
        if destination == 2:
            rank.keep_last_words(data)
        self._console.feed(rank.rank, destination, data, show_prompt=rank.has_terminal)

    def _read_report(self, rank: RankProcess) -> None:
        if not rank.read_report():
            self._selector.unregister(rank.connection)

    def _lose_caller(self) -> None:
        assert self._job.caller is not None
        self._selector.unregister(self._job.caller.socket)
        self._console.broken = True  # the caller was the reader of the output, too

    def _follow_peer(self, notice: int) -> None:
        self._selector.unregister(notice)
        if self._escalation is None:
            self._peer_failed = True
            actions = after_signal(signal.SIGTERM, _GRACE_SECONDS)
            self._escalation = Escalation(actions)

    def _end(self, number: int) -> None:
        """End the ranks because of a signal or, SIGPIPE, because nobody reads the output."""
        self._interrupted_by = self._interrupted_by or number
        actions = after_signal(number, _GRACE_SECONDS)
        self._escalation = Escalation(actions if self._escalation is None else at_once())

    def _note_exits(self) -> None:
        if self._signals.child_ended:
            self._signals.child_ended = False
            # Orphans that this process has adopted would stay zombies.
            for pid in {*processes.children()} - {rank.pid for rank in self._ranks} - self._spare:
                processes.reap(pid, wait=False)
        for rank in self._ranks:
            rank.note_exit()

    def _end_all(self) -> None:
        """End the ranks and the processes that they have started."""
        for rank in self._ranks:
            if rank.is_running:
                rank.send(signal.SIGKILL)
        processes.sweep(spare=self._spare, grace_seconds=_SWEEP_SECONDS)
        self._drain()
        for rank in self._ranks:
            processes.reap(rank.pid, wait=False)  # the kernel may hang in one that was killed

    def _drain(self) -> None:
        """Show the output left in the pipes, without waiting for processes that hold them open."""
        deadline = time.monotonic() + _DRAIN_SECONDS
        while time.monotonic() < deadline and self._serve(0.0):
            pass
        self._console.end_streams()
        for rank in self._ranks:
            if rank.failure and rank.failure.told:
                told = rank.failure.told.full
                self._console.log(rank.rank, told.encode(errors="backslashreplace"))
        self._console.close()
