"""A run's steps: given one after the other, committed, and kept for when the run begins again."""

from __future__ import annotations

import hashlib
import math
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar

import torch

from lockstep.arguments import as_whole_number
from lockstep.checkpoint import Ranks, kind_of
from lockstep.comm import context_of
from lockstep.launcher import START_AGAIN, SnapshotMemory
from lockstep.resume.checkpoints import Checkpoints
from lockstep.resume.pace import Pace
from lockstep.resume.seeds import seed_step
from lockstep.resume.signals import StopSignals
from lockstep.resume.snapshots import Snapshots
from lockstep.world import restarts_of

T = TypeVar("T")
_FORMAT = 1


class _Running:
    """Whether a loop over steps runs, of a group."""

    is_on = False


class Steps(Generic[T]):
    """What :func:`lockstep.steps` returns: iterate over it once.

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
        pace: Pace,
    ) -> None:
        self._ranks, self._batches, self._things = ranks, batches, things
        self._checkpoints, self._pace = checkpoints, pace
        self.restarts, descriptors = restarts_of(os.environ)
        memory = SnapshotMemory.inherited(descriptors) if descriptors else None
        self._snapshots: Snapshots | None = None
        if memory is not None:
            path = "" if checkpoints is None else str(checkpoints.path)
            key = _key_of(ranks, path, things)
            self._snapshots = Snapshots(memory, things, key, ranks.rank, path)
        self.step = self._num_done = self._first = 0
        self._num_steps: float = 0
        self._seed = 0
        self._best: float | None = None
        self._is_best = False
        self._next_meeting = self._next_snapshot = 1
        self._is_over = self._fails = False

    def resume(self, seed: int | None, num_steps: float) -> None:
        """Put all things into the newest state that there is. Every rank calls it."""
        self._num_steps = num_steps
        usable = [] if self._snapshots is None else self._snapshots.usable()
        kinds = {name: kind_of(thing) for name, thing in sorted(self._things.items())}
        self._ranks.check_same({"things": kinds, "seed": seed}, "give to steps()")
        proposed = torch.initial_seed() % 2**62 if seed is None else as_whole_number("seed", seed)
        every = self._ranks.gather(None, [usable, proposed])
        common = set.intersection(*({*steps} for steps, _ in every))
        self._seed = every[0][1]
        state = None
        if common:
            assert self._snapshots is not None
            failure, newest = None, max(common)
            try:
                state = self._snapshots.restore(newest)
            except Exception as error:
                failure = error
            self._ranks.gather(failure)
            self._snapshots.discard(but=newest)
        else:
            if self._snapshots is not None:
                self._snapshots.discard()
            if self._checkpoints is not None:
                state = self._checkpoints.load_newest()
        if state is not None:
            self._put(state, seed)
        self.step = self._first = self._num_done
        self._next_meeting = self._next_snapshot = self._num_done + 1

    def _put(self, state: dict[str, Any], seed: int | None) -> None:
        if state["format"] != _FORMAT or state["batches"].keys() != self._batches.state().keys():
            raise ValueError(
                "The newest checkpoint is of a run whose steps came from "
                f"{'a loader' if 'loader' in state['batches'] else 'numbers'}, or of another "
                "release. Give another path, or what the run was begun with."
            )
        self._num_done, self._best = state["step"], state["best"]
        self._seed = state["seed"] if seed is None else seed
        self._batches.load(state["batches"])

    def _state(self) -> dict[str, Any]:
        return {
            "format": _FORMAT,
            "step": self._num_done,
            "seed": self._seed,
            "best": self._best,
            "batches": self._batches.state(),
        }

    @property
    def epoch(self) -> int:
        """The number of the epoch, from 0."""
        return int(self._batches.epoch)

    @property
    def is_last_of_epoch(self) -> bool:
        """Whether the batch is the last one of its epoch."""
        return bool(self._batches.is_last_of_epoch())

    def best(self, metric: float, *, higher: bool = False) -> bool:
        """Keep the state after this step in ``path``'s folder ``best``, if ``metric`` is the best.

        Rank 0's value counts. Every rank calls it; it blocks.

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
        value = float(self._ranks.gather(None, float(metric))[0])
        sign = -1 if higher else 1
        is_best = not math.isnan(value) and (self._best is None or sign * value < sign * self._best)
        if is_best:
            self._best, self._is_best = value, True
        return is_best

    def __iter__(self) -> Iterator[T]:
        """Yield what each step is to work on."""
        running = context_of(self._ranks.group).get(_Running)
        if running.is_on or self._is_over:
            raise RuntimeError(
                "Another loop over steps() runs already, or this one has run. End the first loop "
                "before the second begins, and call steps() for each."
            )
        running.is_on = self._is_over = True
        try:
            with StopSignals() as signals:
                yield from self._run(signals)
        finally:
            running.is_on = False
            if self._snapshots is not None:
                self._snapshots.close()

    def _run(self, signals: StopSignals) -> Iterator[T]:
        while self._num_done < self._num_steps:
            self._pace.begin_step()
            if (batch := self._batches.next()) is None:
                break
            self.step = self._num_done
            seed_step(self._seed, self.step, self._ranks.rank)
            yield batch[0]
            del batch
            self._pace.end_step()
            self._num_done += 1
            self._commit(signals)
        if self._num_done > self._first:
            self._finish()

    def _commit(self, signals: StopSignals) -> None:
        """Take the state for that after the step; save it if that is due. On all ranks alike."""
        done, checkpoints = self._num_done, self._checkpoints
        saves = checkpoints is not None and checkpoints.is_due(done)
        stops = False
        if done >= self._next_meeting or saves or self._is_best:
            if self._snapshots is not None and done >= self._next_snapshot:
                self._try(self._snapshots.join)
            is_time = checkpoints is not None and checkpoints.is_time
            agreed = self._pace.exchange(stops=bool(signals.name), saves=is_time, fails=self._fails)
            stops, saves = agreed.stops, saves or agreed.saves
            if agreed.fails:
                self._drop_snapshots()
            if self._snapshots is not None and (stops or done >= self._next_snapshot):
                self._take_snapshot()
                self._next_snapshot = done + agreed.snapshot_every
            self._next_meeting = done + agreed.exchange_every
            if self._snapshots is not None:
                self._next_meeting = min(self._next_meeting, self._next_snapshot)
        if checkpoints is not None:
            if self._is_best:
                self._is_best = False
                checkpoints.save_best(self._state())
            if saves or stops:
                checkpoints.save(done, self._state(), waits=stops)
        if stops:
            self._stop(signals.name)

    def _finish(self) -> None:
        if self._checkpoints is not None:
            self._checkpoints.save(self._num_done, self._state(), waits=True)
        if self._snapshots is not None:
            self._try(self._snapshots.join)
            if self._pace.exchange(stops=False, saves=False, fails=self._fails).fails:
                self._drop_snapshots()
            else:
                self._take_snapshot()

    def _take_snapshot(self) -> None:
        assert self._snapshots is not None
        snapshots, state = self._snapshots, self._state()
        self._try(lambda: self._pace.took_snapshot(snapshots.take(self._num_done, state)))

    def _try(self, take: Callable[[], object]) -> None:
        """Take a snapshot, or complete it; if there is no room, all ranks are told at the next."""
        try:
            take()
        except OSError as error:
            print(
                f"lockstep: no snapshots are taken any more: {error}. A restart goes on from the "
                "newest checkpoint.",
                file=sys.stderr,
            )
            self._fails = True

    def _drop_snapshots(self) -> None:
        assert self._snapshots is not None
        self._snapshots.discard()
        self._snapshots.close()
        self._snapshots = None

    def _stop(self, signal_name: str) -> NoReturn:
        if self._ranks.rank == 0:
            why = f"by {signal_name}" if signal_name else "on another rank"
            where = "nowhere, as steps() has no path"
            if self._checkpoints is not None:
                where = f"in {self._checkpoints.path}"
            elif self._snapshots is not None:
                where = "in memory"
            print(
                f"lockstep: asked to stop {why}; {self._num_done} steps are done. The state is "
                f"kept {where}. Start the program again to go on.",
                file=sys.stderr,
                flush=True,
            )
        raise SystemExit(START_AGAIN)


def _key_of(ranks: Ranks, path: str, things: dict[str, Any]) -> bytes:
    """Return the digest of the program and its arguments, to which snapshots belong."""
    digest = hashlib.blake2b(digest_size=32)
    script = getattr(sys.modules["__main__"], "__file__", None) or ""
    try:
        digest.update(Path(script).read_bytes())
    except OSError:
        digest.update(b"no file")
    kinds = {name: kind_of(thing) for name, thing in sorted(things.items())}
    digest.update(repr([script, sys.argv, path, kinds, ranks.rank, ranks.size]).encode())
    return digest.digest()
