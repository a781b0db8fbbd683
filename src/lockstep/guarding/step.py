"""A guarded step, as the program and the next guard of the same optimizer see it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Literal

from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from lockstep.errors import ModelError
from lockstep.generators import Generators
from lockstep.guarding.blame import Blame
from lockstep.guarding.kept import ValueCopies

OnSkip = Literal["drop", "retry"] | Callable[["GuardedStep"], object]


class Misused(ModelError):
    """The body of a guarded step isn't one."""


class GuardedStep:
    """What ``guard()`` tells of a step.

    Attributes:
        number: The number of the step, from 0: of those that this optimizer's guards have begun.
        skipped: Whether no rank has applied it. None while it runs.
        blame: If it was skipped, the :class:`lockstep.Blame`: who, where and why.
        in_a_row: How many steps in a row were skipped, up to this one.
        result: What the body has returned to :meth:`Guard.run`.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.skipped: bool | None = None
        self.blame: Blame | None = None
        self.in_a_row = 0
        self.result: Any = None


class Common:
    """What the guards of an optimizer have in common, of which the program makes one a step.

    It doesn't hold the optimizer.
    """

    def __init__(self) -> None:
        self.num_steps = self.in_a_row = 0
        self.copies, self.generators = ValueCopies(), Generators()


# Ranks may be threads.
_lock = threading.Lock()
_commons: Any = WeakIdKeyDictionary()


def common_of(optimizer: Optimizer) -> Common:
    """Return what the guards of ``optimizer`` have in common."""
    with _lock:
        common: Common | None = _commons.get(optimizer)
        if common is None:
            common = _commons[optimizer] = Common()
        return common
