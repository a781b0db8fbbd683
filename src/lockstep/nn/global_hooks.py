"""torch's global hooks: on changes and copies of parallel models, and on steps of optimizers.

torch calls registration hooks when a parameter or a module is put into a module. They mark the
engine of that model as stale, and it is refreshed before the next forward of any part of the model.

``copy.deepcopy`` and ``pickle`` make plain models, as an EMA or a checkpoint wants. Both end in
``Module.__setstate__``, which is replaced to watch the new models for a backward, and warn of it.

Before an optimizer steps, a rank joins backwards in which it had no gradient: if its loss touches
no parameter of a model, none of the model's hooks runs, and it doesn't know of the other ranks'
backward. But no rank steps without the gradients of all.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from traceback import walk_stack
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as hooks
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from lockstep.comm import uncompiled
from lockstep.errors import AlreadyParallel, ModelError
from lockstep.nn.backward import backward_sync_of
from lockstep.nn.engine import Engine
from lockstep.nn.parallel_state import all_engines, engines_with
from lockstep.nn.wrapper import Wrapper

_log = logging.getLogger(__name__)

# Bound early, as ours may be put in its place.
_TorchDDP = nn.parallel.DistributedDataParallel
# The file of the function that torch puts around every optimizer's step().
_STEPS_IN = sys.modules[Optimizer.__module__].__file__

# Ranks may be threads.
_lock = threading.RLock()
# The global hooks that are hung, by the function that hangs them.
_handles: dict[object, RemovableHandle] = {}
# By the forms of their parameters, the class names of models that are or were parallel; None where
# one has been asked for.
_names_by_form: dict[frozenset[tuple[object, int]], str | None] = {}


def watch(engine: Engine) -> None:
    """Notice changes of the modules of ``engine``, and steps of their optimizers."""
    with _lock:
        _hang(hooks.register_module_parameter_registration_hook, _registered)
        _hang(hooks.register_module_module_registration_hook, _registered)
        _hang(hooks.register_module_buffer_registration_hook, _registered)
        _hang(register_optimizer_step_pre_hook, _before_step)
        _watch_for_distributed_autograd()
        nn.Module.__setstate__ = _set_state_of_copy  # type: ignore[method-assign]
        _names_by_form.setdefault(_form_of(engine.parameters), type(engine.module).__name__)


def unwatch(engine: Engine) -> None:
    """Warn no more of copies of the module of ``engine``."""
    with _lock:
        _names_by_form.pop(_form_of(engine.parameters), None)


def _hang(register: Any, hook: Any) -> None:
    if (register, hook) not in _handles:
        _handles[register, hook] = register(hook)


def _watch_for_distributed_autograd() -> None:
    # Only once RPC has begun, as such a hook takes time in every forward of every module.
    rpc: Any = sys.modules.get("torch.distributed.rpc.api")
    if rpc is None:
        return
    if rpc._is_current_rpc_agent_set():
        _hang(hooks.register_module_forward_pre_hook, _refuse_distributed_autograd)
    elif not isinstance(rpc._init_rpc_states, partial):
        rpc._init_rpc_states = partial(_begin_rpc, rpc._init_rpc_states)


def _begin_rpc(begin: Callable[[object], None], agent: object) -> None:
    begin(agent)
    with _lock:
        _hang(hooks.register_module_forward_pre_hook, _refuse_distributed_autograd)


def mark_stale(engine: Engine) -> None:
    """Let ``engine`` refresh before the next forward of any part of its module."""
    with _lock:
        engine.is_stale = True
        _hang(hooks.register_module_forward_pre_hook, _refresh_stale)


def _form_of(parameters: Iterable[torch.Tensor]) -> frozenset[tuple[object, int]]:
    return frozenset(Counter((p.shape, p.dtype) for p in parameters if p.requires_grad).items())


def _engines_of(module: nn.Module) -> list[Engine]:
    return [engine for engine in all_engines() if module in engine.parts]


@uncompiled
def _registered(module: nn.Module, name: str, value: object) -> None:
    if name in module._buffers:
        return  # a buffer that was there before, as many forwards set them
    if isinstance(module, _TorchDDP) and not isinstance(module, Wrapper):
        _refuse_second_reduction(value)
    for engine in _engines_of(module):
        if isinstance(value, nn.Module):
            engine.parts.update(value.modules())
        mark_stale(engine)


def _refuse_second_reduction(value: object) -> None:
    """Raise if torch's wrapper, which is being constructed, would reduce parameters of engines."""
    if not isinstance(value, nn.Module):
        return
    ignored = getattr(value, "_ddp_params_and_buffers_to_ignore", ())
    if engines_with(p for name, p in value.named_parameters() if name not in ignored):
        raise AlreadyParallel(
            f"This {type(value).__name__} is parallel already, through lockstep, and torch's "
            "DistributedDataParallel is about to be put around it: gradients would be averaged "
            "twice, and come out wrong. If a library does so (Accelerate, Trainer, Lightning), "
            "give it the bare model, with a strategy of lockstep.integrations or within `with "
            "lockstep.integrations.replace_torch_ddp():`; or keep the parallel model from it."
        )


@uncompiled
def _refresh_stale(module: nn.Module, _: object) -> None:
    for engine in _engines_of(module):
        if engine.is_stale:
            # Without the lock, as it waits for the other ranks.
            backward_sync_of(engine.process_group).refresh(engine)
    with _lock:
        if not any(engine.is_stale for engine in all_engines()):
            handle = _handles.pop((hooks.register_module_forward_pre_hook, _refresh_stale), None)
            if handle is not None:
                handle.remove()


@uncompiled
def _refuse_distributed_autograd(module: nn.Module, _: object) -> None:
    """Refuse forwards of parallel models in a context of ``torch.distributed.autograd``.

    Its backward calls no hook of a parameter, and can't be noticed; the forward can.
    """
    if not torch.is_grad_enabled() or not _engines_of(module):
        return
    from torch.distributed import autograd  # which RPC has imported

    try:
        autograd._current_context()
    except RuntimeError:
        return
    raise ModelError(
        f"A parallel {type(module).__name__} runs in a context of "
        "torch.distributed.autograd, which keeps gradients to itself, so that lockstep "
        "can't reduce them. Train it with loss.backward(), or wrap it in "
        "torch.nn.parallel.DistributedDataParallel instead."
    )


_set_state: Any = nn.Module.__setstate__


@uncompiled
def _set_state_of_copy(module: nn.Module, state: dict[str, Any]) -> None:
    """In place of ``Module.__setstate__``: watch copies of parallel models for a backward."""
    _set_state(module, state)
    try:
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    except AttributeError:  # parts in a circle with this one have no state yet
        return
    # Of the module only its name: the garbage collector doesn't see through a parameter's hooks.
    form, kind, handles = _form_of(parameters), type(module).__name__, list[RemovableHandle]()
    if _names_by_form.get(form) is None:
        return

    def warn(parameter: torch.Tensor) -> None:
        for handle in handles:
            handle.remove()
        if engines_with([parameter]):
            return
        with _lock:
            name, _names_by_form[form] = _names_by_form.get(form), None
        if name is not None:
            _log.warning(
                "This %s was copied or unpickled, has the same parameters as a parallel %s, and is "
                "not parallel: each rank trains its own. Call lockstep.parallelize() on it. (This "
                "is said once for a model.)",
                kind,
                name,
            )

    handles += [each.register_post_accumulate_grad_hook(warn) for each in parameters]


@uncompiled
def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if any(callable(value) for value in [*args[1:], *kwargs.values()]):
        return  # a closure, which runs the backward within the step
    engines = engines_with([p for group in optimizer.param_groups for p in group["params"]])
    new = [engine for engine in engines if optimizer not in engine.stepped_by]
    for engine in new:
        engine.stepped_by[optimizer] = engine.num_backwards_stepped
    if new and _is_in_a_step():
        return  # of an optimizer that has others inside, whose own hook ran before
    for engine in engines:
        if backward_sync_of(engine.process_group).is_in_backward(engine):
            raise ModelError(
                f"An optimizer, {type(optimizer).__name__}, steps inside of a backward of this "
                f"{type(engine.module).__name__}, with gradients that are this rank's own still. "
                "Let it step after backward(), or in a hook of "
                "register_post_accumulate_grad_hook(), which is called when the gradient is the "
                "mean over the ranks."
            )
        if engine.num_backwards == engine.stepped_by[optimizer]:
            _take_part(engine)
        engine.num_backwards_stepped = engine.num_backwards
        engine.stepped_by[optimizer] = engine.num_backwards


def _is_in_a_step() -> bool:
    """Whether the step that begins is called by another optimizer's."""
    codes = [frame.f_code for frame, _ in walk_stack(sys._getframe())]
    return sum(code.co_filename == _STEPS_IN and code.co_name == "wrapper" for code in codes) > 1


def _take_part(engine: Engine) -> None:
    # A rank that accumulates gradients without reducing them and then steps means to do so.
    if not engine.is_syncing or engine.reducer.has_unreduced:
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
