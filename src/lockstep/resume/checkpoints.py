"""The checkpoints of a run, of which it finds the newest whole one when it begins again."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from lockstep.checkpoint import OfRank, Ranks, load, save
from lockstep.deadline import Deadline
from lockstep.errors import CheckpointDamaged, CheckpointError, CheckpointNotFound
from lockstep.resume.local_values import local_values, put_local

# The name of what steps() keeps of itself, beside the program's things.
STATE = "steps"
LOCAL = "steps.local"  # no name of a keyword
_NUMBER = re.compile(r"[0-9]{6,}")
_log = logging.getLogger("lockstep")


class Checkpoints:
    """The checkpoints in ``path``, and the best one in its folder ``best``.

    Args:
        path: The folder.
        ranks: All ranks.
        things: What is saved, by name.
        every: The steps, or the time, between two of them.
        keep: How many are left there.
    """

    def __init__(
        self,
        path: Path,
        ranks: Ranks,
        things: Mapping[str, Any],
        every: int | timedelta,
        keep: int,
    ) -> None:
        if path.exists() and not path.is_dir():
            raise ValueError(f"path is {path}, a file. Give a folder for the run's checkpoints.")
        self.path = path
        self._ranks, self._things, self._every, self._keep = ranks, things, every, keep
        self._saved_step = -1
        self._next: Deadline | None = None
        self._wait_anew()

    def _wait_anew(self) -> None:
        if isinstance(self._every, timedelta):
            self._next = Deadline(self._every.total_seconds())

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint is due after so many steps; on every rank alike."""
        return isinstance(self._every, int) and step % self._every == 0

    @property
    def is_time(self) -> bool:
        """Whether it is time for one; ranks' clocks differ."""
        return self._next is not None and not self._next.left()

    def save(self, step: int, state: dict[str, Any], *, waits: bool) -> None:
        """Save the state after ``step`` steps, unless that was done. Every rank calls it."""
        if step == self._saved_step:
            return
        group, things = self._ranks.group_or_none, self._with(state)
        save(self.path, keep=self._keep, async_=not waits, process_group=group, **things)
        self._saved_step = step
        self._wait_anew()

    def save_best(self, state: dict[str, Any]) -> None:
        """Save the best state so far in a folder of its own. Every rank calls it; it blocks."""
        group = self._ranks.group_or_none
        things = self._with(state)
        save(self.path / "best", keep=1, process_group=group, **things)

    def _with(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return all that is saved. Every rank calls it; it blocks."""
        local = local_values(self._ranks, self._things)
        return {**self._things, STATE: state, LOCAL: self._of_rank(local)}

    def _of_rank(self, local: Mapping[str, torch.Tensor]) -> OfRank:
        return OfRank(self._ranks.rank, self._ranks.size, local)

    def load_newest(self) -> dict[str, Any] | None:
        """Load the newest whole checkpoint; return what was kept of steps(), None without one.

        Every rank calls it; it blocks.
        """
        numbers = self._ranks.gather(None, self._numbers() if self._ranks.rank == 0 else [])[0]
        for number in numbers:
            folder = self.path / number
            try:
                things = {**self._things, STATE: None, LOCAL: self._of_rank({})}
                group = self._ranks.group_or_none
                found = load(folder, process_group=group, random_state=False, **things)
            except CheckpointNotFound:
                return None
            except CheckpointDamaged as error:
                if number == numbers[-1]:
                    raise
                _log.warning("%s\nThe run goes on from an older one.", error)
            except CheckpointError as error:
                error.add_note(
                    f"steps() goes on from the newest checkpoint in {self.path}, which is of "
                    "another program or model. Give each run a path of its own."
                )
                raise
            else:
                put_local(self._things, found[LOCAL] or {})
                state: dict[str, Any] = found[STATE]
                self._saved_step = state["step"]
                return state
        return None

    def _numbers(self) -> list[str]:
        names = os.listdir(self.path) if self.path.is_dir() else []
        return sorted(filter(_NUMBER.fullmatch, names), key=int, reverse=True)
