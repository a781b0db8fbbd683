"""What has to happen before an optimizer steps, at the latest.

A rank whose loss touches no parameter of a model runs no hook of it, and so can't know of the
others' backward while its own runs. But no rank steps without gradients of all: before this one
does, it takes part.
"""

from __future__ import annotations

import logging
import weakref
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from lockstep.nn.changes import engines_with

if TYPE_CHECKING:
    from lockstep.nn.engine import Engine

_log = logging.getLogger(__name__)
_hooks: list[RemovableHandle] = []


class _Seen:
    """What is known of an optimizer: the engines of its parameters, and how far they were."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.num_parameters = _num_parameters(optimizer)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.num_backwards = weakref.WeakKeyDictionary(dict.fromkeys(engines_with(parameters), 0))


_seen: weakref.WeakKeyDictionary[Optimizer, _Seen] = weakref.WeakKeyDictionary()


def watch_steps() -> None:
    """From now on look at each optimizer before it steps."""
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_before_step))


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if any(callable(value) for value in [*args[1:], *kwargs.values()]):
        return  # a closure, which runs the backward within the step
    seen = _seen.get(optimizer)
    if seen is None or seen.num_parameters != _num_parameters(optimizer):
        seen = _seen[optimizer] = _Seen(optimizer)
    for engine, num_backwards in list(seen.num_backwards.items()):
        if engine.num_backwards == num_backwards:
            _take_part(engine)
        seen.num_backwards[engine] = engine.num_backwards


def _take_part(engine: Engine) -> None:
    # Who adds up gradients without reducing them and then steps means to do so.
    if not engine.is_syncing or engine.reducer.has_unreduced:
        return
    _log.info(
        "No gradient came to this %s since the last step. Its gradients are those of the other "
        "ranks, from here on; what was done to gradients before (clipping, say) was not done to "
        "these.",
        type(engine.module).__name__,
    )
    engine.take_part_without_gradients()


def _num_parameters(optimizer: Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)
