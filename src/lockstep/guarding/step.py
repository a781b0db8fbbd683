"""A guarded step, as the program and the next guard of the same optimizer see it."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, Literal, NamedTuple

import torch
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from lockstep.arguments import refusal
from lockstep.errors import ModelError
from lockstep.generators import Generators
from lockstep.guarding.blame import Blame
from lockstep.guarding.kept import ValueCopies
from lockstep.guarding.spikes import Losses, Norms

OnSkip = Literal["drop", "retry", "verify"] | Callable[["GuardedStep"], object]


class Misused(ModelError):
    """The body of a guarded step isn't one."""


class GuardedStep:
    """What ``guard()`` tells of a step.

    Attributes:
        number: The number of the step, from 0: of those that this optimizer's guards have begun.
        skipped: Whether no rank has applied it. None while it runs.
        blame: If it was skipped, the :class:`lockstep.Blame`: who, where and why.
        in_a_row: How many steps in a row were skipped, up to this one.
        num_skipped: How many of the optimizer's guarded steps were skipped, up to this one.
        result: What the body has returned to :meth:`Guard.run`.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.skipped: bool | None = None
        self.blame: Blame | None = None
        self.in_a_row = self.num_skipped = 0
        self.result: Any = None
        self._losses: list[torch.Tensor | float] = []

    def watch(self, loss: torch.Tensor | float) -> None:
        """Give the loss to ``guard(spike=)``, which skips a step with a far larger one, too. ::

            with lockstep.guard(model, optimizer, spike=6.0) as step:
                loss = lockstep.mean(F.cross_entropy(model(x), y, reduction="none"))
                step.watch(loss)
                loss.backward()
                optimizer.step()

        Before the optimizer's update, in each step. Losses of several calls are added up, as those
        of micro-batches; the ranks' are averaged when they exchange what they found, not here.

        Args:
            loss: This rank's, or the mean of all; not multiplied by a GradScaler.

        Raises:
            TypeError: If it isn't a number, or a tensor with one element.
        """
        is_one = isinstance(loss, torch.Tensor) and loss.numel() == 1 and not loss.is_complex()
        if not is_one and (isinstance(loss, bool) or not isinstance(loss, int | float)):
            raise TypeError(refusal("watch()'s loss", loss, "a number, or a tensor with one"))
        self._losses.append(loss.detach() if isinstance(loss, torch.Tensor) else loss)

    def take_loss(self) -> float:
        """Return the sum of what was given since the last call: NaN of nothing, else never NaN."""
        losses, self._losses = [*map(float, self._losses)], []
        if not losses:
            return math.nan
        return total if math.isfinite(total := sum(losses)) else math.inf

    def refusal_of_loss(self) -> Misused | None:
        """Return the error of a loss that was given behind the update, if there is one."""
        if not self._losses:
            return None
        return Misused(
            "The body of a guard gives a loss to watch() behind its update, when it is too late to "
            "leave that out. Call watch() before the step of the optimizer."
        )


class StepEntry(Enum):
    """How a guard's step is entered."""

    WITH = "by a with statement, whose body can't be repeated"
    RUN = "by run(), for the first time or again"
    REPEAT = "by run(), to be looked at and left out"


class GuardOptions(NamedTuple):
    """How a guard deals with its steps.

    Attributes:
        on_skip: What follows a skipped step.
        max_consecutive: So many in a row end the run.
        undoes: Whether an update can be undone.
        spike: How many deviations norms of gradients, and losses, may be above those before.
        traces: Whether a step with gradients that aren't finite is repeated, to see where.
        verify_every: After so many steps the next one is repeated on other ranks before.
    """

    on_skip: OnSkip
    max_consecutive: int
    undoes: bool
    spike: float | None
    traces: bool
    verify_every: int | None


class Common:
    """What the guards of an optimizer have in common, of which the program makes one a step.

    It doesn't hold the optimizer.

    Attributes:
        num_updates: How many steps this optimizer has taken since replicas were compared first.
        num_updates_before: The same before the guarded step that runs.
        look: The hook that compares replicas after some of its steps, if there is one.
        compares_next: Whether the ranks' devices had other bits, when they were compared last.
        is_reproducible: Whether repeats had the same bits so far.
        were_alike: Whether parts of other ranks ever had the same bits as there.
    """

    def __init__(self) -> None:
        self.num_steps = self.num_skipped = self.in_a_row = 0
        self.copies, self.generators = ValueCopies(), Generators()
        self.windows = Norms(), Losses()
        self.num_updates = self.num_updates_before = 0
        self.look: RemovableHandle | None = None
        self.compares_next, self.is_reproducible, self.were_alike = False, True, False

    def is_to_leave_out(self, blame: Blame) -> bool:
        """Whether a step is to be skipped, as repeats of it on other ranks came to ``blame``."""
        # What was never alike on all ranks is the program's doing.
        is_told = blame.verdict == "device" or (self.were_alike and blame.verdict == "rank")
        self.compares_next = is_told
        return is_told

    def note_alike(self, blame: Blame | None) -> None:
        """Note that repeats on other ranks had the same bits, or could not be compared."""
        self.compares_next, self.were_alike = False, self.were_alike or blame is None
        if blame is not None:
            self.is_reproducible = False
            text = "verify_every is over, as nothing can be told by it: %s; %s"
            _log.warning(text, blame.error, blame.reason)

    def is_to_compare(self, every: int) -> bool:
        """Whether the next step is to be repeated before, on other ranks, too."""
        return self.is_reproducible and (self.compares_next or (self.num_steps + 1) % every == 0)


_log = logging.getLogger("lockstep")

# What the guards of an optimizer count.
_COUNTS = ("num_steps", "num_skipped", "in_a_row")
# And what they remember.
_WINDOWS = ("norms", "losses")

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


def state_of_commons(optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    """Return what a guard of ``optimizers`` knows of the steps before, as JSON can keep it."""
    commons = [*map(common_of, optimizers)]
    counts = {name: getattr(commons[0], name) for name in _COUNTS}
    windows = zip(*(common.windows for common in commons), strict=True)
    states = [[window.state() for window in each] for each in windows]
    return {**counts, **dict(zip(_WINDOWS, states, strict=True))}


def load_commons(optimizers: Sequence[Optimizer], state: Mapping[str, Any]) -> None:
    """Take up what :func:`state_of_commons` has returned."""
    commons = [*map(common_of, optimizers)]
    if len(state["norms"]) != len(commons):
        raise ValueError(
            f"The state is that of a guard of {len(state['norms'])} optimizers, and this one has "
            f"{len(commons)}."
        )
    for name in _COUNTS:
        setattr(commons[0], name, int(state[name]))
    for number, name in enumerate(_WINDOWS):
        # That of an earlier version has no losses.
        for common, kept in zip(commons, state.get(name) or [()] * len(commons), strict=True):
            common.windows[number].load(kept)
