"""What has to happen before an optimizer steps, at the latest.

A rank whose loss touches no parameter of a model runs no hook of it, and so can't know of the
others' backward while its own runs. But no rank steps without gradients of all: before this one
does, it takes part.
"""

from __future__ import annotations

import logging
import sys
import threading
import weakref
from types import FrameType
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from lockstep.comm.uncompiled import uncompiled
from lockstep.errors import ModelError
from lockstep.nn.changes import engines_with, num_watched, parallel_model_like

if TYPE_CHECKING:
    from lockstep.nn.engine import Engine

_log = logging.getLogger(__name__)
# Where the function is that torch puts around every optimizer's step().
_STEPS_IN = sys.modules[Optimizer.__module__].__file__
# Ranks may be threads, and one hook is for all of them.
_lock = threading.Lock()
_hooks: list[RemovableHandle] = []


class _Seen:
    """What is known of an optimizer: the engines of its parameters, and how far they were."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.num_parameters = _num_parameters(optimizer)
        self.num_watched = num_watched()
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.num_backwards = weakref.WeakKeyDictionary(
            {engine: engine.num_backwards_stepped for engine in engines_with(parameters)}
        )

    def is_of(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer's parameters have the same engines still."""
        counts = (self.num_parameters, self.num_watched)
        return counts == (_num_parameters(optimizer), num_watched())


_seen: weakref.WeakKeyDictionary[Optimizer, _Seen] = weakref.WeakKeyDictionary()


def watch_steps() -> None:
    """From now on look at each optimizer before it steps."""
    with _lock:
        if not _hooks:
            _hooks.append(register_optimizer_step_pre_hook(_before_step))


@uncompiled
def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if any(callable(value) for value in [*args[1:], *kwargs.values()]):
        return  # a closure, which runs the backward within the step
    seen = _seen.get(optimizer)
    if seen is None or not seen.is_of(optimizer):
        before = seen.num_backwards if seen is not None else {}
        seen = _seen[optimizer] = _Seen(optimizer)
        seen.num_backwards.update({e: n for e, n in before.items() if e in seen.num_backwards})
        if not seen.num_backwards:
            _tell_of_copy(optimizer)
        if _is_in_a_step():
            return  # of an optimizer that has others inside, and has been here already
    for engine, num_backwards in list(seen.num_backwards.items()):
        if engine.is_in_backward():
            raise ModelError(
                f"An optimizer, {type(optimizer).__name__}, steps inside of a backward of this "
                f"{type(engine.module).__name__}, with gradients that are this rank's own still. "
                "Let it step after backward(), or in a hook of "
                "register_post_accumulate_grad_hook(), which is called when the gradient is the "
                "mean over the ranks."
            )
        if engine.num_backwards == num_backwards:
            _take_part(engine)
        seen.num_backwards[engine] = engine.num_backwards_stepped = engine.num_backwards


def _tell_of_copy(optimizer: Optimizer) -> None:
    """Warn if ``optimizer`` trains what seems to be a copy of a parallel model, and isn't parallel.

    ``copy.deepcopy`` and ``pickle`` make plain models, as an EMA or a checkpoint wants them.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    name = parallel_model_like(parameters)
    if name is not None:
        _log.warning(
            "This %s trains a model that has the same parameters as a parallel %s, and is not "
            "parallel: each rank trains its own. If it is a copy (copy.deepcopy and pickle make "
            "plain models), call lockstep.parallelize() on it. (This is said once for a model.)",
            type(optimizer).__name__,
            name,
        )


def _is_in_a_step() -> bool:
    """Whether the step that begins is called by another optimizer's."""
    frame: FrameType | None = sys._getframe()
    num_steps = 0
    while frame is not None:
        num_steps += frame.f_code.co_filename == _STEPS_IN and frame.f_code.co_name == "wrapper"
        frame = frame.f_back
    return num_steps > 1


def _take_part(engine: Engine) -> None:
    # Who adds up gradients without reducing them and then steps means to do so.
    if not engine.is_syncing or engine.reducer.has_unreduced:
        return
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None and getattr(dynamo.config, "trace_autograd_ops", False):
        raise ModelError(
            f"No backward of this {type(engine.module).__name__} was seen since the last step: "
            "torch._dynamo.config.trace_autograd_ops makes backward() a part of compiled code, "
            "which calls no hooks of parameters, and so nothing is reduced. Leave it off."
        )
    before = engine.num_gradients()
    engine.take_part_without_gradients()
    if engine.num_gradients() > before:
        _log.warning(
            "No gradient came to this %s since the last step, while other ranks had some, which it "
            "has now too. What was done to gradients since backward(), such as clipping, was not "
            "done to these: with lockstep.mean() they come in backward().",
            type(engine.module).__name__,
        )


def _num_parameters(optimizer: Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)
