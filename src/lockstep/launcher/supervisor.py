"""The process that forks the ranks of one host, watches them, and leaves none behind.

It imports torch once: an import takes about a second, a fork a twentieth of one. A fork copies only
the thread that forks, so the ranks are forked first, and wait for their environments until the
store, which has threads, is open and all hosts have met there.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from lockstep.errors import LaunchError
from lockstep.launcher import processes
from lockstep.launcher.failures import Ended, Failure, Outcome, failure_outcome
from lockstep.launcher.job import FAILURE_GRACE_SECONDS, GRACE_SECONDS, Job, name_of_program
from lockstep.launcher.live import Live, terminal
from lockstep.launcher.output import Console, open_log_files
from lockstep.launcher.processes import AT_ONCE, TELL, Escalation, after_failure, after_signal
from lockstep.launcher.rank_process import RankProcess, fork_ranks, kill_ranks, none_ended
from lockstep.launcher.starting import StartOfMany
from lockstep.printable import printable_lines, signal_name
from lockstep.status import RunStatus

if TYPE_CHECKING:  # it imports torch
    from lockstep.launcher.hosts import Host

_READ_BYTES = 1 << 16
_MOST_DRAINS = 100  # each empties a pipe


def main() -> int:
    """Run the job that the command line tells of; in a rank, and only there, return its exit code.

    The caller exits with it, so that a rank ends as any Python program does.
    """
    # Until there are ranks there is nothing to do but end, and no traceback to show.
    processes.handle(processes.ENDING_SIGNALS, lambda number, frame: os._exit(128 + number))
    processes.handle(processes.PASSED_SIGNALS, _tell_unheard)
    descriptor = int(sys.argv[2])
    with open(descriptor, "rb", closefd=False) as file:
        job: Job = pickle.load(file)
    if job.meeting is None:  # else it shows other launchers on this host that this one is there
        os.close(descriptor)
    else:
        os.set_inheritable(descriptor, False)
    del sys.argv[1:]
    if job.caller is not None:
        processes.end_with_parent(os.getppid(), signal.SIGTERM)
    try:
        return _start(job)
    except Ended as error:
        _conclude(job, error.outcome)
    except LaunchError as error:
        _conclude(job, Outcome(2, message=str(error)))


def _tell_unheard(number: int, _: FrameType | None) -> None:
    words = f"lockstep: {signal_name(number)} came before there were ranks: nothing is done.\n"
    os.write(2, words.encode())


def _start(job: Job) -> int:
    """Fork the ranks, and either be one, or watch them and end."""
    # The collector finds nothing to free in an import, but looks for it a hundred times.
    gc.disable()
    from lockstep.launcher.hosts import Host  # imports torch, so that no rank has to

    # Frozen objects aren't visited by the ranks' collectors, so their memory stays shared.
    gc.freeze()
    gc.enable()
    spare = processes.children()
    processes.adopt_orphans()
    # Blocked, so that no rank runs the supervisor's handlers.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, processes.SIGNALS)
    try:
        status = RunStatus.create(name_of_program(job.program), job.num_ranks)
    except OSError as error:
        raise LaunchError(
            f"There is no memory in which the ranks tell what they do: {error.strerror}. To the "
            "kernel it is a file: is there a limit on the size of files (ulimit -f)? It is to be "
            f"{RunStatus.num_bytes(job.num_ranks) >> 10} KiB or more. Nothing was begun."
        ) from error
    is_live = job.live and job.labelled and terminal() is not None
    for of_rank in status.ranks:
        of_rank.is_shown = is_live
    start = StartOfMany(job, status)
    ranks = fork_ranks(job, mask, status, start)
    if not isinstance(ranks, list):
        return ranks()
    # From here on this is the supervisor.
    guardian = processes.Guardian([rank.pid for rank in ranks])
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    try:
        host = Host(job, none_ended(ranks))
        live = Live(status, host.world_size) if is_live else None
        watch = _Watch(job, host, ranks, {*spare, guardian.pid}, live)
    except (LaunchError, Ended):
        kill_ranks(ranks)
        raise
    else:
        watch.run(start)
    finally:
        guardian.dismiss()
    return _conclude(job, host.settle(watch.outcome(), watch.signals.take_ending), watch.console)


def _conclude(job: Job, outcome: Outcome, console: Console | None = None) -> NoReturn:
    """Send ``outcome`` to the caller or, on a command line, print its message; then end."""
    words = None
    if job.caller is None and outcome.message is not None:
        words = printable_lines(outcome.message)
    with contextlib.suppress(OSError):  # the caller, or the terminal, may be gone
        if console is not None:
            console.finish(words)
        elif words is not None:
            os.write(2, f"lockstep: {words}\n".encode())
        if job.caller is not None:
            with open(job.caller, "wb") as connection:
                pickle.dump(outcome, connection)
    os._exit(outcome.exit_status)


class _Watch:
    """Passes on the ranks' output and takes in their reports, until the last has ended.

    ``spare`` are children of this process that aren't to be ended with the ranks.
    """

    def __init__(
        self, job: Job, host: Host, ranks: list[RankProcess], spare: set[int], live: Live | None
    ) -> None:
        self.signals = processes.SignalPipe()
        self._job, self._host, self._ranks, self._spare = job, host, ranks, spare
        self.console = Console(open_log_files(job.log_dir, host.ranks), self.signals, live)
        self._interrupted_by: int | None = None  # the signal that ended the launcher
        self._interrupted_at = 0.0
        self._peer_failed = False  # whether the ranks of another host failed first
        self._escalation: Escalation | None = None  # None as long as all goes well
        given = job.grace_seconds
        self._grace_seconds = GRACE_SECONDS if given is None else given
        # A failure ends the run within seconds, however long a checkpoint takes at its own end.
        self._failure_grace_seconds = min(FAILURE_GRACE_SECONDS, self._grace_seconds)
        self._selector = selectors.DefaultSelector()
        # Pipes that aren't read until the stream to which they go (1 or 2) has taken more.
        self._paused: dict[int, tuple[int, Callable[[], object]]] = {}
        self._is_draining = False
        self._when_readable(self.signals.fileno(), self.signals.pull)
        if job.caller is not None:
            self._when_readable(job.caller, self._lose_caller)
        if host.notice is not None:
            self._when_readable(host.notice, self._follow_peer)
        for rank in ranks:
            self._when_readable(rank.connection, rank.read_report)
            for destination, output in enumerate(rank.outputs, start=1):
                self._when_readable(output, partial(self._copy, rank, output, destination))

    def run(self, start: StartOfMany) -> None:
        """Let the ranks begin, and watch them until all have ended. However it ends, they do."""
        self._start = start
        try:
            for rank, environment in zip(self._ranks, self._host.environments, strict=True):
                rank.begin(environment)
            self._until_all_ended()
        finally:
            self._end_all()

    def outcome(self) -> Outcome:
        failures = self._failures()
        suspects = [rank.with_last_words(rank.suspect) for rank in self._ranks if rank.suspect]
        if failures and all(failure.lost_a_peer for failure in failures):
            failures += suspects
        if failures:
            return self._outcome_of(failures)
        number = self._interrupted_by
        if self._peer_failed or number is None:  # the peer's host tells of it
            results = tuple(r.result for r in self._ranks if r.result is not None)
            return Outcome(0, results, suspect=self._outcome_of(suspects) if suspects else None)
        if number == signal.SIGPIPE:  # as every program in a pipe that nobody reads from
            return Outcome(128 + number, at_seconds=self._interrupted_at)
        message = f"ended by {signal_name(number)}; no rank is left running."
        return Outcome(128 + number, message=message, at_seconds=self._interrupted_at)

    def _outcome_of(self, failures: list[Failure]) -> Outcome:
        return failure_outcome(
            failures,
            self._host.world_size,
            ended_well=[rank.rank for rank in self._ranks if rank.has_ended_well()],
            full_traceback=self._job.full_traceback,
        )

    def _failures(self) -> list[Failure]:
        return [failure for rank in self._ranks if (failure := rank.failure_unless_asked())]

    def _until_all_ended(self) -> None:
        while any(rank.is_running for rank in self._ranks):
            left = None
            if self._escalation is not None:
                self._note_exits()  # a rank that has ended by itself isn't asked to
                now = time.monotonic()
                for number in self._escalation.take(now):
                    if number == TELL:
                        self._tell_who_runs(self._escalation.seconds_to_kill(now))
                    else:
                        self._send(number)
                left = self._escalation.seconds_left(now)
                if left is None:
                    return  # even SIGKILL doesn't end a rank that hangs in the kernel
            self._serve(left)
            self._note_exits()
            if self._escalation is None and self._failures():
                self._note_stops()
                self._escalation = Escalation(after_failure(self._failure_grace_seconds))

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
        times = [each for each in nexts if each is not None]
        events = self._selector.select(min(times, default=None))
        self._start.tell(self.console.say)
        for key, _ in events:
            if key.data():
                self._selector.unregister(key.fileobj)
        while self.signals.pending:
            number = self.signals.pending.pop(0)
            (self._end if number in processes.ENDING_SIGNALS else self._pass_on)(number)
        if self.console.broken and self._interrupted_by is None:
            self._end(signal.SIGPIPE)
        return bool(events)

    def _when_readable(self, source: int | socket.socket, act: Callable[[], object]) -> None:
        """Call ``act()`` whenever ``source`` is readable, until it returns True."""
        self._selector.register(source, selectors.EVENT_READ, act)

    def _resume(self) -> None:
        """Read the outputs again that are to be, in the end all."""
        for output, (destination, act) in [*self._paused.items()]:
            if self._is_draining or not self.console.is_full(destination):
                del self._paused[output]
                self._when_readable(output, act)

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
            self._host.hurry()

    def _pass_on(self, number: int) -> None:
        """Send the signal to the ranks that have a handler for it; it would end the others."""
        running = [rank for rank in self._ranks if rank.is_running]
        able = [rank for rank in running if processes.expects(rank.pid, number)]
        for rank in able:
            rank.send(number)
        if running and not able:
            self.console.say(
                f"{signal_name(number)} came, and no rank has a handler for it: nothing is done."
            )

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
            rank.note_exit()

    def _note_stops(self) -> None:
        for rank in self._ranks:
            rank.note_stop()

    def _end_all(self) -> None:
        """End the ranks and the processes that they have started."""
        for rank in self._ranks:
            if rank.is_running:
                rank.send(signal.SIGKILL)
        processes.sweep(self._spare)
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
        self.console.wait()
        if self.console.broken and self._interrupted_by is None:
            self._end(signal.SIGPIPE)
