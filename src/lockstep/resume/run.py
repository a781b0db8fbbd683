"""A run's steps: given one after the other, committed, and kept for when the run begins again."""

from __future__ import annotations

import atexit
import logging
import math
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, Generic, NoReturn, TypeVar

import torch

from lockstep import spans
from lockstep.arguments import as_whole_number
from lockstep.checkpoint import Ranks, kind_of
from lockstep.comm import context_of
from lockstep.generators import Seeds, global_generators
from lockstep.launcher import START_AGAIN
from lockstep.resume.accumulation import Accumulation
from lockstep.resume.checkpoints import Checkpoints
from lockstep.resume.in_memory import InMemory
from lockstep.resume.pace import Agreed, SnapshotPace
from lockstep.resume.progress import Progress
from lockstep.resume.seeds import seed_step
from lockstep.resume.signals import StopSignals
from lockstep.status import Asked
from lockstep.world import restarts_of

T = TypeVar("T")
_log = logging.getLogger("lockstep")


def _is_asked() -> bool:
    """Whether this rank's launcher has asked it to stop, as more hosts have come."""
    return spans.status is not None and spans.status.asked is Asked.TO_STOP


class _Loops:
    """The loops over steps of a group, one after the other."""

    number = 0  # of those that were made
    num_steps = 0  # of those that are over
    running: Any = None
    left: int | None = None  # a run's last step, which isn't committed

    def warn_if_left(self) -> None:
        """At the program's end, warn if a run's last step was left by break."""
        if self.left is not None and not hasattr(sys, "last_value"):  # which an error sets
            _log.warning(
                "Step %s, the last one of its run, isn't in any checkpoint: its loop was left by "
                "break, and no other step has committed it. Within a loop over epochs iterate "
                "over steps.rest_of_epoch(), which needs no break.",
                self.left,
            )


class Steps(Generic[T]):
    """What :func:`lockstep.steps` returns: iterate over it.

    A loop that is left by ``break`` goes on where it was when it is iterated over again. That
    commits the step that was left, the run's last one too.

    Attributes:
        step: The number of the step that runs, from 0; before the first one, that of the first.
        restarts: How often the launcher has started this program again.
    """

    def __init__(
        self,
        ranks: Ranks,
        batches: Any,
        things: dict[str, Any],
        checkpoints: Checkpoints | None,
        pace: SnapshotPace,
    ) -> None:
        self._ranks, self._batches, self._things = ranks, batches, things
        self._checkpoints, self._pace = checkpoints, pace
        self._progress = Progress(batches, things, ranks.size)
        self._accumulation = Accumulation(things, tells=ranks.rank == 0)
        self._seeds = Seeds()
        self._loops = context_of(ranks.group).get(_Loops)
        self._signals = StopSignals()
        self.restarts, descriptors = restarts_of(os.environ)
        path = "" if checkpoints is None else str(checkpoints.path)
        self._memory = InMemory(ranks, things, path, self._loops.number, descriptors, pace)
        self._loops.number += 1
        self.step = 0
        self._base: int | None = None  # the steps of earlier loops
        self._next_meeting = 1
        self._is_best = self._saves = False  # due at the step's end
        self._is_in_step = self._is_over = False

    def resume(self, seed: int | None, num_steps: float) -> None:
        """Put all things into the newest state that there is. Every rank calls it."""
        progress = self._progress
        progress.num_steps = num_steps
        kinds = {name: kind_of(thing) for name, thing in sorted(self._things.items())}
        self._ranks.check_same({"things": kinds, "seed": seed}, "give to steps()")
        if self._checkpoints is not None:
            self._checkpoints.prepare()
        proposed = torch.initial_seed() % 2**62 if seed is None else as_whole_number("seed", seed)
        progress.seed = self._ranks.gather(None, proposed)[0]
        state = self._memory.load_newest(self._checkpoints)
        if state is not None:
            progress.load(*state)
            progress.seed = progress.seed if seed is None else seed
        self.step = progress.first = progress.num_done
        self._next_meeting = self._memory.next_step = progress.num_done + 1

    @property
    def epoch(self) -> int:
        """The number of the epoch, from 0."""
        return int(self._batches.epoch)

    @property
    def is_last_of_epoch(self) -> bool:
        """Whether the batch is the last one of its epoch."""
        if not self._batches.is_foreign:
            return bool(self._batches.is_last_of_epoch())
        with global_generators().kept():  # it may read the next batch
            self._seed(self.step + 1)
            return bool(self._batches.is_last_of_epoch())

    def best(self, metric: float, *, higher: bool = False) -> bool:
        """Keep the state after this step in ``path``'s folder ``best``, if ``metric`` is the best.

        Rank 0's value counts. Every rank calls it; it blocks. Behind the run's last step it saves
        at once.

        Args:
            metric: Such as a validation loss.
            higher: Whether higher values are better, as of an accuracy.

        Returns:
            Whether it is the best one so far.

        Raises:
            ValueError: If ``steps()`` has no path.
        """
        if self._checkpoints is None:
            raise ValueError("best() keeps a checkpoint: give steps() a path.")
        value, best = float(self._ranks.gather(None, float(metric))[0]), self._progress.best
        sign = -1 if higher else 1
        is_best = not math.isnan(value) and (best is None or sign * value < sign * best)
        if is_best:
            self._progress.best, self._is_best = value, self._is_in_step
            if not self._is_in_step:
                self._checkpoints.save_best(*self._state())
        return is_best

    def __iter__(self) -> Iterator[T]:
        """Yield what each step is to work on."""
        return self._iterate(one_epoch=False)

    def rest_of_epoch(self) -> Iterator[T]:
        """Yield what each step is to work on up to the end of the epoch, for a loop over epochs.

        What follows the epoch's last step, such as an evaluation, belongs to that step: the next
        call commits it. The run's last step is committed when this iterator ends.
        """
        return self._iterate(one_epoch=True)

    def _iterate(self, *, one_epoch: bool) -> Iterator[T]:
        if self._loops.running is not None:
            raise RuntimeError(
                f"A loop over {'these' if self._loops.running is self else 'other'} steps() runs "
                "already, in step "
                f"{self._loops.running.step}: its batches, its random numbers and its snapshots "
                "are those of one loop. End it before another one begins."
            )
        if self._is_over:
            _log.warning(
                "All of the %s steps of steps() are done, and this loop has none. Iterate over it "
                "once, as it yields the batches of all epochs, or within a loop over epochs over "
                "rest_of_epoch().",
                self._progress.num_done,
            )
            return
        self._loops.running, self._loops.left = self, None
        self._base = self._loops.num_steps if self._base is None else self._base
        try:
            with ExitStack() as stack:
                stack.enter_context(self._signals)
                stack.enter_context(self._accumulation)
                stack.enter_context(self._memory.entered())
                yield from self._run(one_epoch=one_epoch)
        finally:
            self._note_left()
            self._loops.running = None
            self._loops.num_steps = self._base + self._progress.num_done
            if self._is_over:
                self._memory.close()

    def _note_left(self) -> None:
        """Note the run's last step if break, or an error, has left it: at exit that is told."""
        is_last = self._progress.num_done + 1 >= self._progress.num_steps or (
            self._batches.is_last_epoch and self._batches.is_last_of_epoch(reads=False)
        )
        if self._checkpoints is None or not (self._is_in_step and is_last):
            return
        if self._ranks.rank == 0:
            self._loops.left = self.step
            atexit.register(self._loops.warn_if_left)

    def _run(self, *, one_epoch: bool) -> Iterator[T]:
        if self._is_in_step:  # the loop was left, by break or at its epoch's end
            self._end_step()
        progress = self._progress
        while progress.num_done < progress.num_steps:
            self._pace.begin_step()
            if spans.status is not None:
                spans.status.begin_step((self._base or 0) + progress.num_done)
            if self._batches.is_foreign:
                self._seed(progress.num_done)
            if (batch := self._batches.next()) is None:
                break
            self.step = progress.num_done
            self._seed(self.step)
            self._accumulation.begin_step()
            self._is_in_step = True
            yield batch[0]
            del batch
            self._pace.end_step()
            is_last = self._batches.is_last_epoch or progress.num_done + 1 >= progress.num_steps
            if one_epoch and not is_last and self.is_last_of_epoch:
                return  # what follows this loop belongs to the step too
            self._end_step()
        self._finish()

    def _seed(self, step: int) -> None:
        seed_step(self._progress.seed, step, self._ranks.rank, self._seeds)

    def _end_step(self) -> None:
        """Take the state for that after the step; save it if that is due. On all ranks alike."""
        self._is_in_step = False
        self._progress.num_done += 1
        done, checkpoints = self._progress.num_done, self._checkpoints
        if checkpoints is not None:
            self._saves = self._saves or checkpoints.is_due(done)
            if self._is_best:
                self._is_best = False
                checkpoints.save_best(*self._state())
        self._compare()
        if done >= self._next_meeting or self._saves:
            self._meet()

    def _compare(self) -> None:
        """Warn, once, if a step that was repeated after a restart has given something else."""
        differing = self._memory.differing((self._base or 0) + self._progress.num_done)
        if differing is not None:
            _log.warning(
                "The program isn't reproducible: step %s has given %r other values than before "
                "the restart. So parameters at the end depend on where a run was ended. Something "
                "that the step uses isn't among the things of steps(), such as a batch that was "
                "fetched ahead, a variable, a clock, or a generator of random numbers; or an "
                "operator adds up in another order each time.",
                self.step,
                differing,
            )

    def _meet(self) -> None:
        """Agree with the other ranks on what is due, and do it."""
        done, checkpoints, memory = self._progress.num_done, self._checkpoints, self._memory
        takes = memory.is_due(done)
        if takes:
            memory.complete()  # before any rank overwrites the one before
        agreed = self._agree(
            grows=checkpoints is not None and _is_asked(),
            saves=self._saves or (checkpoints is not None and checkpoints.is_time),
            accumulates=self._accumulation.goes_on(),
        )
        self._next_meeting = done + agreed.exchange_every
        ends = agreed.stops or agreed.grows
        if agreed.accumulates and (takes or agreed.saves or ends):
            self._saves, self._next_meeting = agreed.saves, done + 1  # all of it later
            return
        if memory.is_there:
            if takes or ends:
                self._take_snapshot(copies=not ends)
                memory.next_step = done + agreed.snapshot_every
            self._next_meeting = min(self._next_meeting, memory.next_step)
        if checkpoints is not None and (agreed.saves or ends):
            self._saves = False
            checkpoints.save(done, *self._state(), waits=ends)
        if agreed.stops:
            self._stop(self._signals.name)
        if agreed.grows:
            if spans.status is not None:
                spans.status.asked = Asked.STOPS
            raise SystemExit(START_AGAIN)

    def _agree(self, *, grows: bool, saves: bool, accumulates: bool) -> Agreed:
        """Return what holds on any rank; of the last snapshot, do what it needs."""
        agreed = self._pace.exchange(
            stops=bool(self._signals.name),
            grows=grows,
            saves=saves,
            fails=self._memory.fails,
            is_torn=self._memory.is_torn,
            accumulates=accumulates,
        )
        self._memory.settle(agreed)
        return agreed

    def _finish(self) -> None:
        self._is_over = True
        done = self._progress.num_done
        if done == self._progress.first:
            if done and not self.restarts and self._ranks.rank == 0:
                _log.warning(
                    "All of the %s steps of this run were done before: none is left. Give steps() "
                    "more of them, or another path for another run.",
                    done,
                )
            return
        if self._checkpoints is not None:
            self._checkpoints.save(done, *self._state(), waits=True)
        self._memory.complete()
        agreed = self._agree(grows=False, saves=False, accumulates=False)
        self._take_snapshot()
        if agreed.stops:  # what follows the loop is for the next start
            self._stop(self._signals.name)

    def _state(self) -> tuple[dict[str, Any], Any]:
        return self._progress.state(), self._batches.loader_state()

    def _take_snapshot(self, *, copies: bool = True) -> None:
        if self._memory.is_there:
            step = (self._base or 0) + self._progress.num_done
            self._memory.take(step, self._state(), copies=copies)

    def _stop(self, signal_name: str) -> NoReturn:
        if self._ranks.rank == 0:
            why = f"by {signal_name}" if signal_name else "on another rank"
            kept = "The state isn't kept, as steps() has no path."
            if self._checkpoints is not None:
                path = self._checkpoints.path
                kept = f"The state is kept in {path}. Start the program again to go on."
            elif self._memory.is_there:
                kept = "The state is in memory, which ends with the launcher: give a path."
            done = self._progress.num_done
            print(
                f"lockstep: asked to stop {why}; {done} steps are done. {kept}",
                file=sys.stderr,
                flush=True,
            )
        raise SystemExit(START_AGAIN)
