"""A run whose ranks are started again when one has failed: one attempt after the other."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Sequence
from dataclasses import replace

from lockstep.errors import LaunchError
from lockstep.launcher import processes
from lockstep.launcher.failures import Ended, JobOutcome
from lockstep.launcher.hosts import Host
from lockstep.launcher.job import Job
from lockstep.launcher.last_snapshot import WrittenOut, with_last_snapshot, write_out
from lockstep.launcher.live import Live
from lockstep.launcher.output import Console
from lockstep.launcher.rank_process import kill_ranks, none_ended
from lockstep.launcher.restarts import (
    DONT_START_AGAIN,
    START_AGAIN,
    Decision,
    Incident,
    Reaction,
    Record,
)
from lockstep.launcher.snapshot_memory import SnapshotMemory, newest_step
from lockstep.launcher.starting import StartOfMany
from lockstep.launcher.watch import Watch
from lockstep.launcher.zygote import Attempt, NoRoom, Zygote
from lockstep.printable import printable_lines, signal_name
from lockstep.run_status import RankState, RunStatus
from lockstep.status import Asked
from lockstep.world import restart_environment

_MOST_REASON = 120  # characters in the line about a restart
_WRITING_SECONDS = 300.0  # for the last snapshot, at least: a disk of the network may hang
_WRITING = "the last snapshot is being written as a checkpoint, in some seconds. Ctrl-C ends that."


class Attempts:
    """All attempts of a run, on this host.

    Args:
        job: What is run, and how often it may fail.
        zygote: From which attempts are forked.
        status: What the ranks do, in memory that all attempts share.
        snapshots: The descriptors of each rank's, which all attempts share too; with several hosts
            those for copies of another rank's are behind them.
        is_live: Whether that is shown.

    Attributes:
        console: Where output goes; None before the first attempt's ranks have a place.
    """

    def __init__(
        self,
        job: Job,
        zygote: Zygote,
        status: RunStatus,
        snapshots: Sequence[Sequence[int]],
        *,
        is_live: bool,
    ) -> None:
        self.console: Console | None = None
        self._job, self._zygote, self._status, self._is_live = job, zygote, status, is_live
        self._descriptors = snapshots  # those of as many ranks as there are
        self._signals = processes.SignalPipe(job.stop_signals)
        self._record = Record(job.restarts, job.num_spare_ranks)
        self._host: Host | None = None  # of the newest attempt
        self._ended_by = 0  # the first signal that came while the outcome was settled
        self._run_id = ""
        self._begun_at: int | None = None  # the step that the attempt goes on from

    def run(self) -> JobOutcome:
        """Make attempts until none is to follow; return the outcome of the last one."""
        outcome = self._run()
        if self._host is not None and self._host.membership is not None:
            self._host.tell_over(outcome.exit_status)
        return outcome

    def _run(self) -> JobOutcome:
        try:
            while True:
                attempt = self._take()
                if attempt is None or self._signals.is_pending():
                    return self._interrupted(attempt)
                watch = self._watch(attempt)
                outcome = self._outcome(attempt, watch)
                if outcome.exit_status == START_AGAIN and self._is_for_more(watch):
                    continue
                if watch.interrupted_by is not None and not watch.is_hurried:
                    return self._with_last_snapshot(outcome)
                has_failed = outcome.rank is not None or outcome.lost_host is not None
                if not has_failed or watch.interrupted_by or watch.are_running():
                    return outcome
                if outcome.lost_host == 0:  # and so is the store where all would meet
                    return self._with_last_snapshot(outcome)
                if self._ended_by:
                    self._say(printable_lines(outcome.message or ""))
                    return self._interrupted(None)
                reaction = self._decide(outcome)
                if reaction is Reaction.FEWER:
                    self._go_on_with(self._job.num_ranks - 1)
                elif reaction is not Reaction.RESTART:
                    return self._with_last_snapshot(_given_up(outcome, reaction), is_given_up=True)
        except Ended as error:
            return error.outcome
        except LaunchError as error:
            return self._with_last_snapshot(JobOutcome(2, message=str(error)))

    def _take(self) -> Attempt | None:
        """The next attempt, with as many ranks as this host has room for; None if interrupted."""
        while True:
            try:
                num_ranks = self._job.num_ranks
                attempt = self._zygote.take(num_ranks, self._signals.is_pending, self._say)
            except NoRoom as error:
                if not self._record.num_spare:
                    raise
                if error.num_ranks == num_ranks:  # else there is room for the fewer that follow
                    self._record.num_spare -= 1
                    self._say(f"{error} One rank fewer is started.")
                    self._go_on_with(num_ranks - 1)
            else:
                if attempt is None or len(attempt.ranks) == num_ranks:
                    return attempt
                self._drop(attempt)  # of as many as before: it was forked before that was decided

    def _go_on_with(self, num_ranks: int) -> None:
        """Start fewer ranks from now on. What is in memory is of as many as there were."""
        written = WrittenOut()
        if (step := self._newest()) is not None:
            written = self._write_out(step, self._local)
        told = "the program begins anew, or at its newest checkpoint"
        if written.error:
            told = f"the last snapshot wasn't written as a checkpoint: {written.error}; {told}"
        elif written.path:
            told = f"all go on from step {written.step}, of which there is a checkpoint"
        elif written.step is not None:
            told = "the program begins anew, as steps() has no path: snapshots in memory are of one"
            told += " number of ranks"
        ranks = "1 rank goes" if num_ranks == 1 else f"{num_ranks} ranks go"
        self._say(printable_lines(f"{ranks} on: {told}."))
        if not self._ended_by:
            self._clear()
        self._job = self._job._replace(num_ranks=num_ranks)
        self._descriptors = self._descriptors[:num_ranks]

    @property
    def _local(self) -> list[Sequence[int]]:
        """The descriptors of the snapshots of this host's ranks."""
        return [each[: SnapshotMemory.NUM_SLOTS] for each in self._descriptors]

    @property
    def _copies(self) -> list[Sequence[int]]:
        """Those of the copies of the ranks of the host before, if there are several hosts."""
        each_has = [each[SnapshotMemory.NUM_SLOTS :] for each in self._descriptors]
        return [each for each in each_has if each]

    def _of_all_ranks(self) -> list[Sequence[int]]:
        """Those of all ranks of the run, in their order; [] if this host doesn't have them all."""
        host = self._host
        if host is None or host.world_size == len(self._local):
            return self._local
        if not host.are_alike or host.world_size != len(self._local) + len(self._copies):
            return []
        is_first = host.ranks.start == 0
        return [*self._local, *self._copies] if is_first else [*self._copies, *self._local]

    def _clear(self) -> None:
        """Give the memory of all snapshots back: they are of as many ranks as took them."""
        for each in (*self._local, *self._copies):
            SnapshotMemory(each).clear()

    def _write_out(self, step: int, descriptors: Sequence[Sequence[int]]) -> WrittenOut:
        """Have the last snapshot written as a checkpoint, if the program has a folder for some."""
        headers = SnapshotMemory(descriptors[0]).headers().values()
        if not any(header.path for header in headers):
            return WrittenOut(step)
        self._say(_WRITING)
        most_seconds = max(self._job.grace_seconds or 0.0, _WRITING_SECONDS)
        return write_out(descriptors, self._take_ending, most_seconds)

    def _interrupted(self, attempt: Attempt | None) -> JobOutcome:
        """The outcome if a signal came before the ranks have begun, or begin again."""
        if attempt is not None:
            self._drop(attempt)
        number = self._ended_by or self._signals.take_ending()[0]
        if self._host is not None:
            self._host.end_by(number)
        message = f"ended by {signal_name(number)}; no rank is left running."
        return self._with_last_snapshot(JobOutcome(128 + number, message=message))

    def _with_last_snapshot(self, outcome: JobOutcome, *, is_given_up: bool = False) -> JobOutcome:
        """The outcome of a run that has ended otherwise than well; ranks may not have saved.

        Of several hosts it is host 0 that has the last snapshot written or, without it, the other
        one: each of two has copies of the other's snapshots. Of more none has all that is needed.
        """
        descriptors = self._of_all_ranks()
        step = newest_step(map(SnapshotMemory, descriptors))
        if step is None and self._is_asked_before_steps(outcome):
            told = "No step had begun. Give the same command again."
            return replace(outcome, message=f"{outcome.message}\n{told}", run_status=START_AGAIN)
        if outcome.exit_status in (0, START_AGAIN) or step is None:
            return outcome
        is_first = self._host is None or self._host.ranks.start == 0
        if not is_first and outcome.lost_host != 0:
            return outcome
        written = self._write_out(step, descriptors)
        return with_last_snapshot(outcome, written, is_given_up=is_given_up)

    def _is_asked_before_steps(self, outcome: JobOutcome) -> bool:
        """Whether a scheduler's signal has ended ranks before any of them was in a step."""
        asked = {128 + number for number in (signal.SIGTERM, *self._job.stop_signals)}
        have_begun = any(state.num_begun or state.num_steps for state in self._status.read())
        return outcome.rank is None and outcome.exit_status in asked and not have_begun

    def _say(self, words: str) -> None:
        if self.console is not None:
            self.console.say(words)
        else:
            os.write(2, f"lockstep: {words}\n".encode())

    def _drop(self, attempt: Attempt) -> None:
        kill_ranks(attempt.ranks)
        self._dismiss(attempt)

    def _dismiss(self, attempt: Attempt) -> None:
        attempt.guardian.dismiss()
        self._zygote.spare.discard(attempt.guardian.pid)

    def _watch(self, attempt: Attempt) -> Watch:
        """What is to watch the attempt's ranks, which have a place from now on."""
        self._status.clear(self._job.num_ranks)
        try:
            before = self._host
            if before is not None:
                before.close()
            self._host = host = Host(self._job, none_ended(attempt.ranks), before)
            if before is not None and (before.ranks, before.world_size) != (
                host.ranks,
                host.world_size,
            ):
                self._clear()
            self._begun_at = self._newest()
            self._add_variables(host)
            self._signals.listen()
            console = self._console_of(host, host.attempt)
            watch = Watch(self._job, host, attempt.ranks, console, self._signals, self._status)
        except (LaunchError, Ended):
            self._drop(attempt)
            raise
        watch.when_readable(self._zygote.fileno(), self._zygote.receive)
        if host.membership is not None:
            host.membership.when_more_come(self._ask_for_more)
        return watch

    def _ask_for_more(self) -> None:
        """Ask the ranks to stop at a step's end, as more hosts have come; the first one hears."""
        first = self._status.ranks[0]
        if first.asked is Asked.NO:
            first.asked = Asked.TO_STOP

    def _is_for_more(self, watch: Watch) -> bool:
        """Whether the ranks have stopped for hosts that have come; host 0 tells."""
        host = self._host
        if host is None or host.membership is None or watch.is_hurried:
            return False
        is_more = self._status.ranks[0].asked is Asked.STOPS and watch.interrupted_by is None
        reaction = Reaction.MORE if is_more and not self._ended_by else Reaction.STOPPED
        with contextlib.suppress(RuntimeError, ValueError, Ended):  # they have saved in any case
            text = Decision(reaction, "").encoded()
            text = host.decide(text, is_restart=reaction is Reaction.MORE, lost=None)
            reaction = Decision.of(text).reaction
            if reaction is Reaction.MORE and watch.interrupted_by is None:
                self._say(f"{reaction.value}: all go on with them from the checkpoint.")
                return True
        return False

    def _console_of(self, host: Host, number: int) -> Console:
        live = Live(self._status, host.world_size) if self._is_live else None
        if self.console is None:
            self.console = Console(self._signals, live)
        else:
            self.console.begin_anew(live)
        self.console.keep_logs(self._job.log_dir, host.ranks, number)
        return self.console

    def _add_variables(self, host: Host) -> None:
        """Tell the ranks how often they were started; the run's name for torchrun's stays."""
        self._run_id = self._run_id or host.environments[0]["TORCHELASTIC_RUN_ID"]
        descriptors = self._descriptors if host.are_alike else self._local
        for variables, snapshots in zip(host.environments, descriptors, strict=True):
            variables |= {
                **restart_environment(host.attempt, snapshots, self._record.num_alike),
                "TORCHELASTIC_RESTART_COUNT": str(host.attempt),
                "TORCHELASTIC_MAX_RESTARTS": str(self._job.restarts),
                "TORCHELASTIC_RUN_ID": self._run_id,
            }

    def _outcome(self, attempt: Attempt, watch: Watch) -> JobOutcome:
        """Run the ranks to their end."""
        assert self._host is not None

        def when_failed() -> bool:
            if may_follow := self._may_follow():
                self._zygote.ask(self._job.num_ranks)
            return may_follow

        try:
            watch.run(StartOfMany(self._job, self._status), self._zygote.spare, when_failed)
        finally:
            self._dismiss(attempt)
        outcome = self._host.settle(watch.outcome(), self._take_ending)
        watch.close()
        return outcome

    def _take_ending(self) -> list[int]:
        found = self._signals.take_ending()
        self._ended_by = self._ended_by or next(iter(found), 0)
        return found

    def _may_follow(self) -> bool:
        if self._job.meeting is not None:  # host 0 decides
            return True
        is_new = self._newest() != self._begun_at
        return self._record.num_left > 0 or self._record.num_spare > 0 or is_new

    def _newest(self) -> int | None:
        """The newest step that all ranks of this host can go on from."""
        return newest_step(map(SnapshotMemory, self._local))

    def _incident(self, outcome: JobOutcome) -> Incident:
        assert self._host is not None
        states = self._status.read()
        step = max(map(self._step, [s for s in states if s.rank == outcome.rank] or states))
        return Incident(outcome.reason, step, self._newest(), outcome.is_of_start)

    def _step(self, state: RankState) -> int:
        """In which step a rank was; without a loop over steps(), as far as optimizers tell."""
        if state.num_begun:
            return state.num_begun - 1
        return (self._begun_at or 0) + state.num_steps

    def _decide(self, outcome: JobOutcome) -> Reaction:
        """Return what host 0 decides, and say so if the ranks are started again."""
        assert self.console is not None
        assert self._host is not None
        incident = self._incident(outcome)
        reaction = self._record.judge(incident)
        words = self._told(outcome, incident, reaction)
        text = Decision(reaction, words).encoded()
        is_restart = reaction in (Reaction.RESTART, Reaction.FEWER)
        try:
            lost = outcome.lost_host
            text = self._host.decide(text, is_restart=is_restart, lost=lost)
            reaction, words = Decision.of(text)
        except Ended:
            self._say(printable_lines(outcome.message or ""))
            raise
        except (RuntimeError, ValueError) as error:
            raise LaunchError(
                f"{outcome.message}\nHost 0 didn't tell whether the ranks are started again: "
                f"{error}. Start the run anew on all hosts."
            ) from error
        if reaction in (Reaction.RESTART, Reaction.FEWER):
            self.console.say(printable_lines(f"{outcome.message}\n{words}"))
        return reaction

    def _told(self, outcome: JobOutcome, incident: Incident, reaction: Reaction) -> str:
        """Why the ranks are started again, and from where they go on."""
        assert self._host is not None
        reason = outcome.reason
        if len(reason) > _MOST_REASON:
            reason = reason[: _MOST_REASON - 3] + "..."
        who = f"rank {outcome.rank} of {self._host.world_size} failed in step {incident.step}"
        onwards = "the program begins anew, or at its newest checkpoint"
        if incident.committed is not None:
            onwards = f"all go on from step {incident.committed}"
            if self._record.num_alike > 1:  # see lockstep.resume.newest
                onwards = f"all go on from an older step than {incident.committed}, if there is one"
        if outcome.lost_host is not None:
            assert self._job.meeting is not None
            who = f"the run was in step {incident.step}"
            onwards = (
                "all go on from the last snapshot of which another host has a copy, else from the "
                "newest checkpoint, when 'lockstep run' is given again on that host within "
                f"{self._job.meeting.timeout_seconds} s (--rdzv-timeout)"
            )
            if self._host.num_others >= self._job.meeting.least_hosts:
                onwards = "the others go on from the newest checkpoint"
        line = f"restart {self._host.attempt + 1}: {who} ({reason}); "
        if reaction is Reaction.FEWER:
            return f"{line}{reaction.value}."
        line += f"{onwards}. "
        return line + f"{self._record.num_left} more without progress, and it isn't started again."


def _given_up(outcome: JobOutcome, reaction: Reaction) -> JobOutcome:
    message = f"{outcome.message}\nThe ranks aren't started again: {reaction.value}."
    if reaction is Reaction.NO_PROGRESS:
        return replace(outcome, message=message)
    return replace(outcome, message=message, run_status=DONT_START_AGAIN)
