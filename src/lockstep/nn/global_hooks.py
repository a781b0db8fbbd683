"""torch's global hooks: for changes of parallel models, and for steps of optimizers.

torch calls registration hooks when a parameter or a module is put into a module. They mark the
engine of a parallel module as stale, and it is refreshed before the next forward of any part of it.

Before an optimizer steps, a rank takes part in backwards in which it had no gradient: if its loss
depends on no parameter of a model, none of the model's hooks runs, and the rank doesn't know of the
other ranks' backward. But no rank may step without the gradients of all.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Collection, Sequence
from traceback import walk_stack
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as hooks
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lockstep.comm import is_compiled, uncompiled
from lockstep.errors import AlreadyParallel, ModelError
from lockstep.nn.autograd import NOT_DISTRIBUTED, may_be_distributed
from lockstep.nn.backward import all_engines, backward_sync_of, engines_with, finish_failed
from lockstep.nn.engine import Engine
from lockstep.nn.forward_hooks import (
    ALWAYS,
    backward_has_ended,
    before_forward,
    engines_of,
    hang,
    look_later,
    mark_stale,
    refuse_distributed_autograd,
    stop_looking,
    watch_compiled,
)
from lockstep.nn.lookups import watch_lookups
from lockstep.nn.moves import watch_moves
from lockstep.nn.samples import kept
from lockstep.nn.shard import refuse_in_shard
from lockstep.nn.wrapper import Wrapper
from lockstep.world import accelerator, keepers, parameters_of, watch_optimizers

_log = logging.getLogger(__name__)

# Bound early, as lockstep.integrations may put our class in its place.
_TorchDDP = nn.parallel.DistributedDataParallel
# The file of the function that torch puts around every optimizer's step().
_STEPS_IN = sys.modules[Optimizer.__module__].__file__


def watch(engine: Engine) -> None:
    """Watch the module of ``engine`` for changes, and for steps of its optimizers."""
    hang(hooks.register_module_parameter_registration_hook, _registered)
    hang(hooks.register_module_module_registration_hook, _registered)
    hang(hooks.register_module_buffer_registration_hook, _registered)
    if hang(register_optimizer_step_pre_hook, _before_step):
        keepers.append(kept)
        watch_optimizers(after_other_hooks=True)
    if may_be_distributed():  # not before: in each forward of each module it costs time
        hang(hooks.register_module_forward_pre_hook, refuse_distributed_autograd)
    engine.watch.backward_ended = backward_has_ended
    weakref.finalize(engine, stop_looking).atexit = False
    if engine.module is not None:
        watch_lookups(engine.module)
    for compiled in filter(is_compiled, [*engine.modules]):
        compiled._forward_pre_hooks[ALWAYS] = before_forward
    if accelerator() is not None:
        watch_moves()
        engine.watch.is_to_look = True  # its parameters may be moved by hand
        look_later()


def watch_steps_in_shards() -> None:
    """Refuse steps of optimizers within a loop over shards, on one rank too."""
    hang(register_optimizer_step_pre_hook, _refuse_step_in_shard)


@uncompiled
def _refuse_step_in_shard(optimizer: Optimizer, *_: object) -> None:
    refuse_in_shard(f"{type(optimizer).__name__} steps")


@uncompiled
def _registered(module: nn.Module, name: str, value: object) -> None:
    if name in module._buffers:
        return  # a new value of a buffer, which many modules set in each forward
    if is_compiled(module):
        watch_compiled(module, value)
        return
    is_torchs = isinstance(module, _TorchDDP) and not isinstance(module, Wrapper)
    if is_torchs and isinstance(value, nn.Module):
        _leave_to_torch(value)
    for engine in engines_of(module):
        if isinstance(value, nn.Module):
            engine.modules.update(value.modules())
        mark_stale(engine)


def _leave_to_torch(module: nn.Module) -> None:
    """Raise if engines reduce parameters of ``module``.

    It is called when torch's wrapper is constructed around ``module``.
    """
    ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    if engines_with([p for name, p in module.named_parameters() if name not in ignored]):
        raise AlreadyParallel(
            f"This {type(module).__name__} is parallel already, through lockstep, and torch's "
            "DistributedDataParallel is about to be put around it: gradients would be averaged "
            "twice, and come out wrong. If a library does so (Accelerate, Trainer, Lightning), "
            "give it the bare model, with a strategy of lockstep.integrations or within `with "
            "lockstep.integrations.replace_torch_ddp():`; or keep the parallel model from it."
        )


def _refuse_distributed_step(optimizer: Optimizer, engine: Engine) -> None:
    """Refuse steps of ``DistributedOptimizer``, with gradients that ``engine`` hasn't reduced.

    Where RPC began after the model was made parallel, this is the first that lockstep learns of it,
    unless the loss is a :func:`lockstep.mean`; from then on, backwards are refused before a step.
    What DistributedOptimizer compiles, such as its SGD and Adam, calls no hook of steps, and isn't
    seen here.
    """
    if hang(hooks.register_module_forward_pre_hook, refuse_distributed_autograd):
        for each in all_engines():
            each.refuse_distributed_autograd()
    distributed: Any = sys.modules.get("torch.distributed.optim.optimizer")
    codes = {frame.f_code for frame, _ in walk_stack(sys._getframe())}
    if distributed is not None and distributed._LocalOptimizer.step.__code__ in codes:
        raise ModelError(
            f"{NOT_DISTRIBUTED % type(engine.module).__name__} Here DistributedOptimizer steps its "
            f"parameters, with {type(optimizer).__name__}."
        )


@uncompiled
def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if any(callable(value) for value in [*args[1:], *kwargs.values()]):
        return  # with a closure, the step runs the backward itself
    parameters = parameters_of(optimizer)
    engines = engines_with(parameters)
    if engines and may_be_distributed():
        _refuse_distributed_step(optimizer, engines[0])
    new = [engine for engine in engines if optimizer not in engine.stepped.by]
    for engine in new:
        engine.stepped.by[optimizer] = engine.stepped.num_backwards
    if new and _is_in_a_step():
        return  # the outer optimizer, which steps this one, has called this hook before
    _refuse_put_in_place(parameters, engines)
    receive_gradients(optimizer, engines)
    _refuse_scaled_rows(optimizer, parameters, engines)
    note_step(optimizer, engines)


def receive_gradients(optimizer: Optimizer, engines: Collection[Engine]) -> None:
    """Take part in backwards in which this rank has had no gradient since the last step."""
    for engine in engines:
        if backward_sync_of(engine.process_group).is_in_backward(engine):
            raise ModelError(
                f"An optimizer, {type(optimizer).__name__}, steps inside of a backward of this "
                f"{type(engine.module).__name__}, with gradients that are this rank's own still. "
                "Let it step after backward(), or in a hook of "
                "register_post_accumulate_grad_hook(), which is called when the gradient is the "
                "mean over the ranks."
            )
        stepped = engine.stepped.by.get(optimizer, engine.stepped.num_backwards)
        # A class whose step calls that of its base class has called this before.
        if engine.num_backwards == stepped and not _is_in_a_step():
            _take_part(engine)


def note_step(optimizer: Optimizer, engines: Collection[Engine]) -> None:
    """Note that ``optimizer`` steps with the gradients of all backwards until now, or skips it."""
    for engine in engines:
        engine.stepped.num_backwards = engine.num_backwards
        engine.stepped.by[optimizer] = engine.num_backwards


def _refuse_put_in_place(parameters: Sequence[torch.Tensor], engines: Collection[Engine]) -> None:
    """Raise if all parameters of a model were put in place, and no forward of a module followed.

    Then no hook has run. They are among ``parameters``, if the optimizer has been made since; or
    those that it has are of ``engines``. An engine that has reduced gradients since the last step
    has looked for itself. Other ranks may be in a backward, at the end of which all look.
    """
    for engine in all_engines():
        if engine.is_syncing and engine.num_backwards == engine.stepped.num_backwards:
            new = {*map(id, engine.put_in_place().values())}
            if new and (engine in engines or not new.isdisjoint(map(id, parameters))):
                if not engine.is_stale:  # then a backward would refresh it
                    backward_sync_of(engine.process_group).take_part(engine)
                finish_failed(engine.process_group)
                if engine.put_in_place():  # other ranks' backward has not taken them yet
                    engine.take_put_in_place()


def _refuse_scaled_rows(
    optimizer: Optimizer, parameters: Sequence[torch.Tensor], engines: Collection[Engine]
) -> None:
    """Raise if lookups have scaled rows here since the last backward, as no other rank has them.

    A rank that steps with gradients of its own has tables of its own, on purpose.
    """
    for engine in engines:
        is_alike = engine.is_syncing and not engine.reducer.table.has_unreduced
        if is_alike and (found := engine.renormed.changed_one_of(parameters)):
            name, rows = found
            raise ModelError(
                f"Before this step of {type(optimizer).__name__}, and after the last backward, "
                f"lookups with max_norm have scaled {len(rows)} rows of {name!r} on rank "
                f"{engine.process_group.rank()} (the first is {rows[0]}), which other ranks don't "
                "have yet: their tables would become different. Ranks take scaled rows over at the "
                "end of a backward. Let forwards without backward come after step(), or call "
                "lockstep.sync_buffers(model) on every rank before it."
            )


def _is_in_a_step() -> bool:
    """Whether the step that begins is called by the step of another optimizer."""
    codes = [frame.f_code for frame, _ in walk_stack(sys._getframe())]
    return sum(code.co_filename == _STEPS_IN and code.co_name == "wrapper" for code in codes) > 1


def _take_part(engine: Engine) -> None:
    # A rank that steps with accumulated gradients, which it hasn't reduced, does so on purpose.
    if not engine.is_syncing or engine.reducer.table.has_unreduced:
        return
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None and getattr(dynamo.config, "trace_autograd_ops", False):
        raise ModelError(
            f"No backward of this {type(engine.module).__name__} was seen since the last step: "
            "torch._dynamo.config.trace_autograd_ops makes backward() a part of compiled code, "
            "which calls no hooks of parameters, and so nothing is reduced. Leave it off."
        )
    num_gradients = len(engine.gradients())
    backward_sync_of(engine.process_group).take_part(engine)
    if len(engine.gradients()) > num_gradients:
        _log.warning(
            "No gradient came to this %s since the last step, while other ranks had some, which it "
            "has now too. What was done to gradients since backward(), such as clipping, was not "
            "done to these: with lockstep.mean() they come in backward().",
            type(engine.module).__name__,
        )
