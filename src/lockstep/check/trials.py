"""Suspects, each of which a trial switches off: if the difference goes, it was the cause."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import StrEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

import lockstep.nn
import lockstep.optim
from lockstep.check import together
from lockstep.check.records import CheckPlan, Exchange, of_rank
from lockstep.check.switches import Switches
from lockstep.check.together import Together, line_of_program
from lockstep.generators import global_generators
from lockstep.world import World


class Suspect(StrEnum):
    """What may let runs part, and what a trial does instead."""

    OPTIONS = "options"  # all take rank 0's learning rates and other options
    START = "start"  # all models start as rank 0's
    CHANGES = "changes"  # parameters that are changed between steps become rank 0's
    SYNC = "no_sync"  # no_sync() does nothing
    KEPT = "kept"  # gradients are removed after each step
    CLIP = "clip"  # nothing is clipped
    SEEDS = "seeds"  # all ranks have rank 0's seeds
    AVERAGE = "average"  # gradients are averaged before each step
    BATCH_NORM = together.BATCH_NORM  # these five are given all ranks' samples
    MEANS = together.MEANS
    STATISTICS = together.STATISTICS
    SUMS = together.SUMS
    ROWS = "rows"  # each rank's loss is weighted by the number of its samples
    DRAWS = together.DRAWS  # one process is given the ranks' random numbers
    PERMUTATIONS = together.PERMUTATIONS
    WORLD_SIZE = "world_size"  # one process is told the number of ranks


# What is changed in one process, and needn't be on the ranks; and what is changed in both.
ALONE_ONLY = {Suspect.WORLD_SIZE}
BOTH = {Suspect.KEPT, Suspect.CLIP, Suspect.DRAWS, Suspect.PERMUTATIONS}


class Trial:
    """Notes what suspects the program gives reason for, and switches off those of ``plan``.

    Attributes:
        together: The mode under which the program runs; None if it runs as it is.
        sites: For each suspect, the lines of the program.
    """

    def __init__(
        self,
        plan: CheckPlan,
        rank: int,
        switches: Switches,
        is_active: Callable[[], bool],
        num_rows: Callable[[], int],
    ) -> None:
        self._plan, self._switches = plan, switches
        self._is_alone = plan.run is not None
        self._suspects = {Suspect(name) for name in plan.suspects}
        self._exchange = Exchange(plan, rank) if plan.trial else None
        self._is_active = is_active
        self._num_steps = 0
        self._noted: dict[str, list[str]] = {}
        self.together: Together | None = None
        if plan.trial:
            kinds = self._suspects & {*together.KINDS}
            exchange = self._exchange if kinds else None
            self.together = Together(kinds, is_active, num_rows, exchange, is_alone=self._is_alone)

    @property
    def sites(self) -> dict[str, list[str]]:
        """For each suspect, the lines of the program."""
        return self._noted | (self.together.sites if self.together is not None else {})

    def has(self, suspect: Suspect) -> bool:
        """Whether ``suspect`` is switched off."""
        return suspect in self._suspects

    def _note(self, suspect: Suspect, what: str = "") -> None:
        line = line_of_program()
        named = f"{what} ({line})" if line else what
        known = self._noted.setdefault(suspect, [])
        if named not in known:
            known.append(named)

    def watch(self) -> None:
        """Note calls from now on."""
        wrap = self._switches.wrap
        for owner in (nn.utils, nn.utils.clip_grad):
            wrap(owner, "clip_grad_norm_", self._clip_norm)
            wrap(owner, "clip_grad_value_", self._clip_value)
        wrap(lockstep.optim, "clip_grad_norm_", self._clip_norm)
        wrap(lockstep.nn, "no_sync", self._no_sync)
        for cls in (nn.parallel.DistributedDataParallel, lockstep.nn.DistributedDataParallel):
            wrap(cls, "no_sync", self._no_sync)
        wrap(torch, "manual_seed", self._seed)
        wrap(random, "seed", self._seed)
        if (numpy := sys.modules.get("numpy")) is not None:
            wrap(numpy.random, "seed", self._seed)
            wrap(numpy.random, "default_rng", self._seed)
        if self.has(Suspect.WORLD_SIZE):
            self._tell_number_of_ranks()

    def _clip_norm(
        self, original: Callable[..., Any], parameters: Any, max_norm: float, *args: Any, **o: Any
    ) -> Any:
        self._note(Suspect.CLIP, "clip_grad_norm_")
        return original(parameters, torch.inf if self.has(Suspect.CLIP) else max_norm, *args, **o)

    def _clip_value(self, original: Callable[..., Any], *args: Any, **options: Any) -> Any:
        self._note(Suspect.CLIP, "clip_grad_value_")
        return None if self.has(Suspect.CLIP) else original(*args, **options)

    def _no_sync(
        self, original: Callable[..., AbstractContextManager[None]], model: Any
    ) -> AbstractContextManager[None]:
        self._note(Suspect.SYNC, "no_sync")
        return nullcontext() if self.has(Suspect.SYNC) else original(model)

    def _seed(self, original: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if args and line_of_program():
            self._note(Suspect.SEEDS, f"{original.__name__}({args[0]})")
            if self.has(Suspect.SEEDS) and self._exchange is not None and not self._is_alone:
                args = self._exchange.of_first("seed", args)
        return original(*args, **options)

    def _tell_number_of_ranks(self) -> None:
        """Let the program, but not lockstep or torch, see as many ranks as there were."""
        number, kept = self._plan.num_ranks, "world_size"

        def get(world: World) -> int:
            return number if _is_program() else int(vars(world)[kept])

        def put(world: World, value: int) -> None:
            vars(world)[kept] = value

        def group_size(original: Callable[..., int], *args: Any, **options: Any) -> int:
            return number if _is_program(3) else original(*args, **options)

        World.world_size = property(get, put)  # type: ignore[assignment]
        self._switches.wrap(dist, "get_world_size", group_size)

    # Moments of the training.

    def start(self, tensors: dict[str, torch.Tensor]) -> None:
        """When an optimizer is made: let ``tensors`` be rank 0's."""
        if self.has(Suspect.START):
            self._copy_first("start", tensors)

    def before_backward(self, tensors: Any, num_rows: int, trained: dict[str, torch.Tensor]) -> Any:
        """Return the losses to differentiate."""
        if self.has(Suspect.CHANGES):
            self._copy_first("changes", trained)
        if self.has(Suspect.ROWS) and self._exchange and isinstance(tensors, torch.Tensor):
            numbers = self._exchange.gather("rows", num_rows)
            return tensors * (num_rows * len(numbers) / max(1, sum(numbers)))
        return tensors

    def before_step(self, optimizer: Optimizer, trained: Sequence[torch.Tensor]) -> None:
        """Change options and gradients as the suspects say."""
        self._num_steps += 1
        if self.has(Suspect.OPTIONS):
            if not self._is_alone and self._exchange is not None:
                set_options(optimizer, self._exchange.of_first("options", options_of(optimizer)))
            elif step := self._plan.records(of_rank(0)).step(self._num_steps):
                set_options(optimizer, step.options)
        if self.has(Suspect.AVERAGE) and self._exchange is not None:
            self._average(trained, self._exchange)

    @staticmethod
    def _average(trained: Sequence[torch.Tensor], exchange: Exchange) -> None:
        local = [None if p.grad is None else _dense(p.grad).cpu() for p in trained]
        everyone = exchange.gather("gradients", local)
        for index, parameter in enumerate(trained):
            given = [each[index] for each in everyone if each[index] is not None]
            if given and not all(torch.equal(each, given[0]) for each in given[1:]):
                mean = torch.stack(given).sum(0) / len(everyone)
                parameter.grad = mean.to(parameter.device, parameter.dtype)

    def after_batch(self) -> None:
        """Let random and NumPy, which nothing else replaces, go on as on rank 0."""
        are_shared = self.has(Suspect.DRAWS) or self.has(Suspect.PERMUTATIONS)
        if are_shared and self._exchange is not None and not self._is_alone:
            generators = global_generators()
            del generators["torch"]
            generators.write(self._exchange.of_first("random", generators.read()))

    def after_step(self, trained: Iterable[torch.Tensor]) -> None:
        """Remove gradients."""
        if self.has(Suspect.KEPT):
            for parameter in trained:
                parameter.grad = None

    def _copy_first(self, key: str, tensors: dict[str, torch.Tensor]) -> None:
        assert self._exchange is not None
        local = {name: tensor.detach().cpu() for name, tensor in tensors.items()}
        given = self._exchange.of_first(key, local)
        with torch.no_grad():
            for name, tensor in tensors.items():
                if name in given and not torch.equal(given[name], local[name]):
                    tensor.copy_(given[name])

    def note_kept(self, trained: Iterable[torch.Tensor]) -> None:
        """Note gradients that there are before the first backward of a step."""
        gradients = (parameter.grad for parameter in trained)
        if any(g is not None and bool(_dense(g).any()) for g in gradients):
            self._noted.setdefault(Suspect.KEPT, [])


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_dense() if tensor.layout is not torch.strided else tensor).detach()


def _is_program(depth: int = 2) -> bool:
    name = str(sys._getframe(depth).f_globals.get("__name__", ""))
    return name.partition(".")[0] not in ("lockstep", "torch", "dataclasses")


def options_of(optimizer: Optimizer) -> dict[str, float]:
    """Learning rates and other numbers, by names such as ``lr`` or, of other groups, ``lr[1]``."""
    return {
        name + (f"[{number}]" if number else ""): float(value)
        for number, group in enumerate(optimizer.param_groups)
        for name, value in group.items()
        if isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.dim() == 0)
    }


def set_options(optimizer: Optimizer, options: dict[str, float]) -> None:
    """Give ``optimizer`` what ``options_of()`` returned."""
    current = options_of(optimizer)
    for number, group in enumerate(optimizer.param_groups):
        for name, value in group.items():
            key = name + (f"[{number}]" if number else "")
            if key not in current or current[key] == options.get(key, current[key]):
                continue
            if isinstance(value, torch.Tensor):
                value.fill_(options[key])
            else:
                group[name] = type(value)(options[key])
