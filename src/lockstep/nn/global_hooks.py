"""torch's global hooks: for changes of parallel models, and for steps of optimizers.

torch calls registration hooks when a parameter or a module is put into a module. They mark the
engine of a parallel module as stale, and it is refreshed before the next forward of any part of it.
Before the first one after a backward it looks for what was put there without their being called.

Before an optimizer steps, a rank takes part in backwards in which it had no gradient: if its loss
depends on no parameter of a model, none of the model's hooks runs, and the rank doesn't know of the
other ranks' backward. But no rank may step without the gradients of all.
"""

from __future__ import annotations

import logging
import sys
import threading
import weakref
from collections.abc import Collection, Sequence
from traceback import walk_stack
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as hooks
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from lockstep.comm import has_compiled, is_compiled, uncompiled
from lockstep.errors import AlreadyParallel, ModelError
from lockstep.nn.autograd import NOT_DISTRIBUTED, may_be_distributed, refuse_distributed_context
from lockstep.nn.backward import all_engines, backward_sync_of, engines_with, finish_failed
from lockstep.nn.engine import Engine
from lockstep.nn.lookups import watch_lookups
from lockstep.nn.moves import watch_moves
from lockstep.nn.samples import kept
from lockstep.nn.shard import refuse_in_shard
from lockstep.nn.watch import Forwards
from lockstep.nn.wrapper import Wrapper
from lockstep.world import accelerator, keepers, parameters_of, watch_optimizers

_log = logging.getLogger(__name__)

# Bound early, as lockstep.integrations may put our class in its place.
_TorchDDP = nn.parallel.DistributedDataParallel
# The file of the function that torch puts around every optimizer's step().
_STEPS_IN = sys.modules[Optimizer.__module__].__file__

# Ranks may be threads.
_lock = threading.RLock()
# The keys of a hook of single modules, called in the next forward and in each; torch's are >= 0.
_ONCE, _ALWAYS = -1, -2
# The registered global hooks, by the function that registers them and the hook.
_handles: dict[object, RemovableHandle] = {}


def watch(engine: Engine) -> None:
    """Watch the module of ``engine`` for changes, and for steps of its optimizers."""
    with _lock:
        _hang(hooks.register_module_parameter_registration_hook, _registered)
        _hang(hooks.register_module_module_registration_hook, _registered)
        _hang(hooks.register_module_buffer_registration_hook, _registered)
        _hang(register_optimizer_step_pre_hook, _before_step)
        if kept not in keepers:
            keepers.append(kept)
            watch_optimizers(after_other_hooks=True)
        if may_be_distributed():  # not before: in each forward of each module it costs time
            _hang(hooks.register_module_forward_pre_hook, _refuse_distributed_autograd)
    engine.watch.backward_ended = _backward_has_ended
    weakref.finalize(engine, _stop_looking).atexit = False
    if engine.module is not None:
        watch_lookups(engine.module)
    for compiled in filter(is_compiled, [*engine.modules]):
        compiled._forward_pre_hooks[_ALWAYS] = _before_forward
    if accelerator() is not None:
        watch_moves()
        engine.watch.is_to_look = True  # its parameters may be moved by hand
        _look_later()


def watch_steps_in_shards() -> None:
    """Refuse steps of optimizers within a loop over shards, on one rank too."""
    with _lock:
        _hang(register_optimizer_step_pre_hook, _refuse_step_in_shard)


@uncompiled
def _refuse_step_in_shard(optimizer: Optimizer, *_: object) -> None:
    refuse_in_shard(f"{type(optimizer).__name__} steps")


def _hang(register: Any, hook: Any) -> None:
    if (register, hook) not in _handles:
        _handles[register, hook] = register(hook)


def _remove(register: Any, hook: Any) -> None:
    if (handle := _handles.pop((register, hook), None)) is not None:
        handle.remove()


def mark_stale(engine: Engine) -> None:
    """Have ``engine`` refreshed before the next forward of any part of its module."""
    engine.is_stale = True
    if has_compiled():
        _watch_its_modules(engine)
    else:
        engine.watch.refreshing = Forwards.OF_ALL
        _look_later()


def _look_later() -> None:
    with _lock:
        if not has_compiled():
            _hang(hooks.register_module_forward_pre_hook, _before_forward)


def _backward_has_ended(engine: Engine) -> None:
    """Look at ``engine`` before the next forward, if the backward was its own.

    Else a hook on all modules would take time in all forwards until its own.
    """
    if engine.watch.is_to_look:
        _look_later()
    elif engine.watch.refreshing is Forwards.OF_ALL:
        _watch_its_modules(engine)


def _watch_its_modules(engine: Engine) -> None:
    """Refresh ``engine`` before the next forward of its modules, without a hook on all others.

    But modules are pickled and scripted with their hooks, so this is not the first choice.
    """
    engine.watch.refreshing = Forwards.OF_ITS_MODULES
    for module in [*engine.modules]:
        if not isinstance(module, torch.jit.ScriptModule):
            module._forward_pre_hooks[_ONCE] = _before_forward


def _watch_compiled(compiled: nn.Module, module: object) -> None:
    """Have a hook of ``compiled``, which torch.compile() has made of ``module``, called.

    Compiled modules would warn of one on all modules, which is removed.
    """
    for engine in all_engines():
        if module in engine.modules:
            engine.modules.add(compiled)
            compiled._forward_pre_hooks[_ALWAYS] = _before_forward
        if engine.watch.refreshing is Forwards.OF_ALL:
            _watch_its_modules(engine)
    with _lock:
        _remove(hooks.register_module_forward_pre_hook, _before_forward)


def _engines_of(module: nn.Module) -> list[Engine]:
    return [engine for engine in all_engines() if module in engine.modules]


@uncompiled
def _registered(module: nn.Module, name: str, value: object) -> None:
    if name in module._buffers:
        return  # a new value of a buffer, which many modules set in each forward
    if is_compiled(module):
        _watch_compiled(module, value)
        return
    is_torchs = isinstance(module, _TorchDDP) and not isinstance(module, Wrapper)
    if is_torchs and isinstance(value, nn.Module):
        _leave_to_torch(value)
    for engine in _engines_of(module):
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


@uncompiled
def _before_forward(module: nn.Module, _: object) -> None:
    module._forward_pre_hooks.pop(_ONCE, None)
    for engine in _engines_of(module):
        if engine.watch.refreshing is not Forwards.NONE:
            # Without the lock, as this waits for the other ranks.
            backward_sync_of(engine.process_group).refresh(engine)
            for each in engine.modules:
                each._forward_pre_hooks.pop(_ONCE, None)
        if engine.watch.is_to_look and torch.is_grad_enabled():
            engine.look()
    _stop_looking()
    if not torch.is_grad_enabled():
        _pause_in(module)


def _stop_looking() -> None:
    """Remove the hook on forwards, unless it is to do something in the next one of some engine."""
    waiting = (e.watch.is_to_look or e.watch.refreshing is Forwards.OF_ALL for e in all_engines())
    with _lock:
        if not any(waiting):
            _remove(hooks.register_module_forward_pre_hook, _before_forward)


def _pause_in(module: nn.Module) -> None:
    """Have no hook called before forwards of modules within ``module``, in which no graph is made.

    In an evaluation it would take time in each, and what follows is to be looked at. Where other
    threads run, one of them may train meanwhile: a rank that is a thread does.
    """
    is_to_refresh = any(each.watch.refreshing is Forwards.OF_ALL for each in all_engines())
    if is_to_refresh or _may_train_meanwhile():
        return
    if isinstance(module, torch.jit.ScriptModule):  # scripts take no other hooks
        return
    with _lock:
        if (hooks.register_module_forward_pre_hook, _before_forward) not in _handles:
            return
        _remove(hooks.register_module_forward_pre_hook, _before_forward)

    def go_on(*_: object) -> None:
        handle.remove()
        _look_later()

    handle = module.register_forward_hook(go_on, always_call=True)


def _may_train_meanwhile() -> bool:
    """Whether there are threads of the program beside this one."""
    others = [each for each in threading.enumerate() if each is not threading.current_thread()]
    return any(not each.name.startswith("lockstep-") for each in others)


@uncompiled
def _refuse_distributed_autograd(module: nn.Module, _: object) -> None:
    """Refuse forwards of parallel models in a context of ``torch.distributed.autograd``.

    Other forwards, as those of a method, are refused in the backward: its errors lose their text.
    """
    if _engines_of(module):
        refuse_distributed_context(type(module).__name__)


def _refuse_distributed_step(optimizer: Optimizer, engine: Engine) -> None:
    """Refuse steps of ``DistributedOptimizer``, with gradients that ``engine`` hasn't reduced.

    Where RPC began after the model was made parallel, this is the first that lockstep learns of it,
    unless the loss is a :func:`lockstep.mean`; from then on, backwards are refused before a step.
    What DistributedOptimizer compiles, such as its SGD and Adam, calls no hook of steps, and isn't
    seen here.
    """
    hook = hooks.register_module_forward_pre_hook, _refuse_distributed_autograd
    with _lock:
        is_new = hook not in _handles
        _hang(*hook)
    if is_new:
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
