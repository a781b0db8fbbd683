"""The checkpoints of a run, of which it finds the newest whole one when it begins again."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lockstep.checkpoint import OfRank, Ranks, background_of, load, open_newest, save
from lockstep.deadline import Deadline
from lockstep.errors import CheckpointDamaged, CheckpointError, CheckpointNotFound, SaveFailed
from lockstep.resume.local_values import local_values, put_local
from lockstep.tree import decode

# The name of what steps() keeps of itself, beside the program's things.
STATE = "steps"
# No names of keywords.
LOCAL, LOADER = "steps.local", "steps.loader"
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
        things: dict[str, Any],
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

    def save(self, step: int, state: dict[str, Any], loader_state: Any, *, waits: bool) -> None:
        """Save the state after ``step`` steps, unless that was done. Every rank calls it."""
        if step == self._saved_step:
            if waits:
                background_of(self._ranks.group).finish_on(self._ranks)
            return
        if not self._are_spoiled(step):
            group, things = self._ranks.group_or_none, self._with(state, loader_state)
            save(self.path, keep=self._keep, async_=not waits, process_group=group, **things)
        elif waits:
            background_of(self._ranks.group).finish_on(self._ranks)
        self._saved_step = step
        self._wait_anew()

    def save_best(self, state: dict[str, Any], loader_state: Any) -> None:
        """Save the best state so far in a folder of its own. Every rank calls it; it blocks."""
        if self._are_spoiled(state["step"]):
            return
        group = self._ranks.group_or_none
        things = self._with(state, loader_state)
        save(self.path / "best", keep=1, process_group=group, **things)

    def _are_spoiled(self, step: int) -> bool:
        """Whether parameters aren't finite, which is told: a good checkpoint has to stay.

        Every rank calls it; it blocks.
        """
        by_rank = self._ranks.gather(None, nonfinite_parameters(self._things))
        names: list[str] = next(filter(None, by_rank), [])
        if names and self._ranks.rank == 0:
            _log.warning(
                "After step %d %d trained parameters aren't finite, %s first. No checkpoint is "
                "written of that: those in %s stay.",
                step,
                len(names),
                names[0],
                self.path,
            )
        return bool(names)

    def _with(self, state: dict[str, Any], loader_state: Any) -> dict[str, Any]:
        """Return all that is saved. Every rank calls it; it blocks."""
        more = {} if loader_state is None else {LOADER: loader_state}
        local, apart = local_values(self._ranks, self._things, more)
        things = {name: each for name, each in (self._things | more).items() if name not in apart}
        state = state | {"ranks": self._ranks.size, "apart": apart}
        return things | {STATE: state, LOCAL: self._of_rank(local)}

    def _of_rank(self, local: Mapping[str, Any]) -> OfRank:
        return OfRank(self._ranks.rank, self._ranks.size, local)

    def prepare(self) -> None:
        """Make the folder, so that one that can't be made is known before training.

        A save of an earlier loop that still goes on is completed before that.

        Every rank calls it; it blocks.

        Raises:
            SaveFailed: If that isn't possible.
        """
        background_of(self._ranks.group).finish_on(self._ranks)
        failure = None
        if self._ranks.rank == 0:
            try:
                self.path.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                failure = SaveFailed(f"The folder {self.path} can't be made ({error.strerror}).")
        self._ranks.gather(failure)

    def load_first(self, numbers: Sequence[str]) -> tuple[dict[str, Any], Any] | None:
        """Load the first of these that is whole; return what was kept of steps(), None without one.

        Every rank calls it; it blocks.

        Returns:
            What is the same on all ranks, and the state of a foreign loader.
        """
        for number in numbers:
            try:
                return self._load(self.path / number)
            except CheckpointNotFound:
                return None
            except CheckpointDamaged as error:
                if number == numbers[-1]:
                    raise
                _log.warning("%s\nThe run goes on from an older one.", error)
            except (CheckpointError, ValueError) as error:
                error.add_note(
                    f"steps() goes on from the newest checkpoint in {self.path}, which is of "
                    "another program, model or loader. Give each run a path of its own."
                )
                raise
        return None

    def _load(self, folder: Path) -> tuple[dict[str, Any], Any]:
        group = self._ranks.group_or_none
        kept: dict[str, Any] = {STATE: None, LOCAL: self._of_rank({})}
        found = load(folder, process_group=group, random_state=False, **kept)
        state, local = found[STATE], found[LOCAL]
        if LOADER in local and state["ranks"] != self._ranks.size:
            raise ValueError(
                f"The loader had another state on each of {state['ranks']} ranks, and there are "
                f"{self._ranks.size} now. Start as many, or begin a run with "
                "lockstep.DataLoader, which goes on at any number."
            )
        apart = state.get("apart", ())  # their states are among the local ones
        things = {name: each for name, each in self._things.items() if name not in apart}
        load(folder, process_group=group, random_state=False, **things)
        put_local(self._things, local)
        self._saved_step = state["step"]
        return state, local.get(LOADER, found.get(LOADER))

    def numbers(self) -> list[str]:
        """Return the names of all, from the newest on. Every rank calls it; it blocks."""
        names = []
        if self._ranks.rank == 0 and self.path.is_dir():
            names = sorted(filter(_NUMBER.fullmatch, os.listdir(self.path)), key=int, reverse=True)
        found: list[str] = self._ranks.gather(None, names)[0]
        return found

    def steps_of(self, numbers: Sequence[str]) -> list[int]:
        """Return how many steps each has, -1 of one that isn't whole. Every rank calls it."""
        steps = [step_of(self.path / each) for each in numbers] if self._ranks.rank == 0 else []
        found: list[int] = self._ranks.gather(None, steps)[0]
        return found


def nonfinite_parameters(things: Mapping[str, Any]) -> list[str]:
    """Return the names of trained parameters of modules that have NaN or infinity."""
    named = [
        (f"{thing}.{name}", parameter.detach())
        for thing, module in things.items()
        if isinstance(module, nn.Module)
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and not is_lazy(parameter)
        if parameter.layout is torch.strided
    ]
    # One wait for each device, not for each parameter.
    flags = [(name, parameter.isfinite().all()) for name, parameter in named]
    found: list[str] = []
    for device in dict.fromkeys(flag.device for _, flag in flags):
        names = [name for name, flag in flags if flag.device == device]
        are_finite = torch.stack([flag for _, flag in flags if flag.device == device]).tolist()
        found += [name for name, is_finite in zip(names, are_finite, strict=True) if not is_finite]
    return found


def step_of(path: Path) -> int:
    """Return how many steps the newest checkpoint has, -1 if there is none that is whole."""
    try:
        manifest = open_newest(path)
        things, read = manifest.facts["things"], manifest.read
        return int(manifest.parse(lambda: int(decode(things[STATE]["tree"], read)["step"])))
    except CheckpointError:
        return -1
