"""Whether gradients are being accumulated over several steps: no state can be taken in between."""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from lockstep.checkpoint import unwrapped
from lockstep.grad import gradient_of, lacks_gradient
from lockstep.world import parameters_of

_log = logging.getLogger("lockstep")
_NUM_WATCHED = 4  # parameters of an optimizer
# After so many steps in a row gradients are left aside by the program, and won't be used.
_PATIENCE_STEPS = 256


class _Used(NamedTuple):
    """What a parameter had as its gradient when its optimizer had used it."""

    parameter: torch.Tensor
    gradient: Callable[[], torch.Tensor | None]  # not held: its memory may be used anew
    version: int

    def is_the_same(self) -> bool:
        """Whether nothing was added to it since."""
        now = gradient_of(self.parameter)
        return now is None or (now is self.gradient() and now._version == self.version)


class Accumulation:
    """Watches the optimizers among ``things``, while it is entered.

    After a step gradients are of no use any more, if their optimizer has stepped since they were
    computed. Else the program may be adding up those of several steps, and state without them isn't
    enough to go on from.

    Args:
        things: All things.
        tells: Whether this rank says so if that has no end.
    """

    def __init__(self, things: Mapping[str, Any], *, tells: bool) -> None:
        self._tells = tells
        self._optimizers: list[Optimizer] = [
            unwrapped(thing) for thing in things.values() if isinstance(thing, Optimizer)
        ]
        self._stepped = set[int]()
        self._used: dict[int, list[_Used]] = {}
        self._num_in_a_row = 0
        self._hook: Any = None

    def __enter__(self) -> Accumulation:
        """Begin to watch."""
        self._hook = register_optimizer_step_post_hook(lambda *args: self._note(args[0]))
        return self

    def __exit__(self, *_: object) -> None:
        """Watch no longer."""
        self._hook.remove()

    def begin_step(self) -> None:
        """A step of the run begins."""
        self._stepped.clear()

    def goes_on(self) -> bool:
        """Whether gradients of this step are to be added to those of the next, as far as one sees.

        Each step's end may ask it, once.
        """
        found = any(self._is_open(optimizer) for optimizer in self._optimizers)
        self._num_in_a_row = self._num_in_a_row + 1 if found else 0
        if self._num_in_a_row == _PATIENCE_STEPS + 1 and self._tells:
            _log.warning(
                "There are gradients that no optimizer has used for %s steps of steps(). They are "
                "kept in no snapshot and no checkpoint: if a later step uses them, a run that was "
                "ended goes on with other numbers. Set them to None: optimizer.zero_grad().",
                _PATIENCE_STEPS,
            )
        return 0 < self._num_in_a_row <= _PATIENCE_STEPS

    def _note(self, optimizer: Any) -> None:
        self._stepped.add(id(optimizer))
        if len(self._optimizers) > 1:
            self._used[id(optimizer)] = [*map(_used, _watched(optimizer))]

    def _is_open(self, optimizer: Optimizer) -> bool:
        if id(optimizer) in self._stepped:
            return False
        used = self._used.get(id(optimizer))
        if used is None:
            return not all(map(lacks_gradient, parameters_of(optimizer)))
        return not all(each.is_the_same() for each in used)


def _used(parameter: torch.Tensor) -> _Used:
    gradient = gradient_of(parameter)
    if gradient is None:
        return _Used(parameter, lambda: None, 0)
    return _Used(parameter, weakref.ref(gradient), gradient._version)


def _watched(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return some parameters, such that have gradients if there are any."""
    with_gradients = (p for p in parameters_of(optimizer) if gradient_of(p) is not None)
    found = [*itertools.islice(with_gradients, _NUM_WATCHED)]
    return found or [*itertools.islice(parameters_of(optimizer), _NUM_WATCHED)]
