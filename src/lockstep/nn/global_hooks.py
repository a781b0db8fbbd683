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
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from traceback import walk_stack
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules import module as hooks
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from lockstep.comm import uncompiled
from lockstep.errors import AlreadyParallel, ModelError
from lockstep.nn.autograd import NOT_DISTRIBUTED, may_be_distributed
from lockstep.nn.backward import all_engines, backward_sync_of, engines_with
from lockstep.nn.engine import Engine
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
# By the forms of models that are or were parallel, their groups; and the forms of which a copy was
# warned of.
_groups_by_form: dict[object, weakref.WeakSet[dist.ProcessGroup]] = {}
_told_forms: set[object] = set()


def watch(engine: Engine) -> None:
    """Notice changes of the modules of ``engine``, and steps of their optimizers."""
    global _set_state
    with _lock:
        _hang(hooks.register_module_parameter_registration_hook, _registered)
        _hang(hooks.register_module_module_registration_hook, _registered)
        _hang(hooks.register_module_buffer_registration_hook, _registered)
        _hang(register_optimizer_step_pre_hook, _before_step)
        _watch_for_rpc()
        if _set_state is None:  # others may replace it later, too
            _set_state = nn.Module.__setstate__
            nn.Module.__setstate__ = _set_state_of_copy  # type: ignore[method-assign]
        _know_form(_form_of(engine.module), engine)


def unwatch(engine: Engine) -> None:
    """Warn no more of copies of the module of ``engine``."""
    with _lock:
        _groups_by_form.pop(_form_of(engine.module), None)


def _hang(register: Any, hook: Any) -> None:
    if (register, hook) not in _handles:
        _handles[register, hook] = register(hook)


def _watch_for_rpc() -> None:
    rpc: Any = sys.modules.get("torch.distributed.rpc.api")
    if rpc is not None and not isinstance(rpc._init_rpc_states, partial):
        rpc._init_rpc_states = partial(_begin_rpc, rpc._init_rpc_states)
    if may_be_distributed():  # such a hook takes time in every forward of every module
        _hang(hooks.register_module_forward_pre_hook, _refuse_distributed_autograd)


def _begin_rpc(begin: Callable[[object], None], agent: object) -> None:
    begin(agent)
    with _lock:
        _watch_for_rpc()
    for engine in all_engines():
        engine.refuse_distributed_autograd()


def mark_stale(engine: Engine) -> None:
    """Let ``engine`` refresh before the next forward of any part of its module."""
    with _lock:
        engine.is_stale = True
        _hang(hooks.register_module_forward_pre_hook, _refresh_stale)


def _engines_of(module: nn.Module) -> list[Engine]:
    return [engine for engine in all_engines() if module in engine.parts]


@uncompiled
def _registered(module: nn.Module, name: str, value: object) -> None:
    if name in module._buffers:
        return  # a buffer that was there before, as many forwards set them
    if isinstance(module, _TorchDDP) and not isinstance(module, Wrapper):
        _refuse_second_reduction(value)
        _leave_to_torch(value)
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

    What doesn't come here is refused in the backward, whose errors lose their text.
    """
    if not torch.is_grad_enabled() or not _engines_of(module):
        return
    from torch.distributed import autograd  # which RPC has imported

    try:
        autograd._current_context()
    except RuntimeError:
        return
    raise ModelError(NOT_DISTRIBUTED % type(module).__name__)


# torch's function, or whose was in its place, once ours is.
_set_state: Any = None


@uncompiled
def _set_state_of_copy(module: nn.Module, state: dict[str, Any]) -> None:
    """In place of ``Module.__setstate__``: watch copies of parallel models for a backward."""
    _set_state(module, state)
    # Any module of the program comes here, in any state: parts that are in a circle with it may
    # have none yet. Nothing of it may fail.
    with suppress(Exception), _lock:
        form = _form_of(module)
        for engine in all_engines():  # a parallel model may have changed
            if type(engine.module) is type(module) and _form_of(engine.module) == form:
                _know_form(form, engine)
        if form in _groups_by_form and form not in _told_forms:
            _CopyHook(form, type(module).__name__, _groups_by_form[form]).hang(module)


def _know_form(form: object, engine: Engine) -> None:
    groups = _groups_by_form.setdefault(form, weakref.WeakSet())
    if not groups:  # those of earlier models are gone
        _told_forms.discard(form)
    groups.add(engine.process_group)


def _form_of(module: nn.Module | None) -> object:
    parameters = [] if module is None else module.parameters()
    return type(module), frozenset(Counter(parameter.shape for parameter in parameters).items())


class _CopyHook:
    """Warns in the first backward of a copy of a parallel model, unless it is parallel by then.

    Of the model it has only the name: the garbage collector doesn't see through a parameter's
    hooks.
    """

    def __init__(self, form: object, name: str, groups: weakref.WeakSet[dist.ProcessGroup]) -> None:
        self._form, self._name, self._groups = form, name, groups
        self._handles: list[RemovableHandle] = []

    def __reduce__(self) -> tuple[type[bool], tuple[()]]:
        """A copy, which a handle may hold, is nothing, as no parameter has it."""
        return bool, ()

    def hang(self, module: nn.Module) -> None:
        """Wait for a gradient of any parameter."""
        for parameter in module.parameters():
            if parameter.requires_grad:
                self._handles.append(parameter.register_post_accumulate_grad_hook(self))

    def remove(self) -> None:
        """Wait no longer."""
        for handle in self._handles:
            handle.remove()

    @uncompiled
    def __call__(self, parameter: torch.Tensor) -> None:
        """Warn."""
        self.remove()
        if engines_with([parameter]):
            return
        with _lock:
            is_first = bool(self._groups) and self._form not in _told_forms
            if is_first:
                _told_forms.add(self._form)
        if is_first:
            _log.warning(
                "This %s was copied or unpickled, has the same parameters as a parallel %s, and is "
                "not parallel: each rank trains its own. Call lockstep.parallelize() on it. (This "
                "is said once for a model.)",
                self._name,
                self._name,
            )


def _leave_to_torch(value: object) -> None:
    """Don't warn of a copy that is put into torch's own wrapper."""
    for parameter in value.parameters() if isinstance(value, nn.Module) else ():
        for hook in list((parameter._post_accumulate_grad_hooks or {}).values()):
            if isinstance(hook, _CopyHook):
                hook.remove()


@uncompiled
def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if any(callable(value) for value in [*args[1:], *kwargs.values()]):
        return  # a closure, which runs the backward within the step
    engines = engines_with(p for group in optimizer.param_groups for p in group["params"])
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
