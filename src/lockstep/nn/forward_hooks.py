"""The hook on forwards, by which torch tells before one that a parallel model may have changed.

It takes time in all forwards of all modules. So it is there from the end of a backward, or from a
change, up to the next forward that has a graph, and not in between.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as hooks
from torch.utils.hooks import RemovableHandle

from lockstep.comm import has_compiled, uncompiled
from lockstep.errors import ModelError
from lockstep.nn.autograd import refuse_distributed_context
from lockstep.nn.backward import all_engines, backward_sync_of
from lockstep.nn.engine import Engine
from lockstep.nn.watch import Forwards

# Ranks may be threads.
_lock = threading.RLock()
# The keys of a hook of single modules, called in the next forward and in each; torch's are >= 0.
_ONCE, ALWAYS = -1, -2
# The registered global hooks, by the function that registers them and the hook.
_handles: dict[object, RemovableHandle] = {}


def hang(register: Any, hook: Any) -> bool:
    """Register a global hook, once; return whether it wasn't registered."""
    with _lock:
        if is_new := (register, hook) not in _handles:
            _handles[register, hook] = register(hook)
        return is_new


def _remove() -> bool:
    """Remove the hook on forwards; return whether it was there."""
    with _lock:
        handle = _handles.pop((hooks.register_module_forward_pre_hook, before_forward), None)
        if handle is not None:
            handle.remove()
        return handle is not None


def mark_stale(engine: Engine) -> None:
    """Have ``engine`` refreshed before the next forward of any part of its module."""
    engine.is_stale = True
    if has_compiled():
        _watch_its_modules(engine)
    else:
        engine.watch.refreshing = Forwards.OF_ALL
        look_later()


def look_later() -> None:
    """Have the hook called before the next forward, unless compiled modules would warn of it."""
    with _lock:
        if not has_compiled():
            hang(hooks.register_module_forward_pre_hook, before_forward)


def backward_has_ended(engine: Engine) -> None:
    """Look at ``engine`` before the next forward, if the backward was its own.

    Else a hook on all modules would take time in all forwards until its own.
    """
    if engine.watch.is_to_look:
        look_later()
    elif engine.watch.refreshing is Forwards.OF_ALL:
        _watch_its_modules(engine)


def _watch_its_modules(engine: Engine) -> None:
    """Refresh ``engine`` before the next forward of its modules, without a hook on all others.

    But modules are pickled and scripted with their hooks, so this is not the first choice.
    """
    engine.watch.refreshing = Forwards.OF_ITS_MODULES
    for module in [*engine.modules]:
        if not isinstance(module, torch.jit.ScriptModule):
            module._forward_pre_hooks[_ONCE] = before_next_forward


def watch_compiled(compiled: nn.Module, module: object) -> None:
    """Have a hook of ``compiled``, which torch.compile() has made of ``module``, called.

    Compiled modules would warn of one on all modules, which is removed.
    """
    for engine in all_engines():
        if module in engine.modules:
            engine.modules.add(compiled)
            compiled._forward_pre_hooks[ALWAYS] = before_forward
        if engine.watch.refreshing is Forwards.OF_ALL:
            _watch_its_modules(engine)
    _remove()


def engines_of(module: nn.Module) -> list[Engine]:
    """Return the engines of parallel models that ``module`` is a part of."""
    return [engine for engine in all_engines() if module in engine.modules]


@uncompiled
def before_forward(module: nn.Module, _: object) -> None:
    """Refresh, and look at, the engines of ``module`` that wait for it.

    Not where a graph is made of the forward, for which there may be no values: the next one does.
    Shown by test_a_model_that_waits_is_exported_traced_scripted_and_pickled.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return
    module._forward_pre_hooks.pop(_ONCE, None)
    for engine in engines_of(module):
        if engine.watch.refreshing is not Forwards.NONE:
            # Without the lock, as this waits for the other ranks.
            backward_sync_of(engine.process_group).refresh(engine)
            for each in engine.modules:
                each._forward_pre_hooks.pop(_ONCE, None)
        if engine.watch.is_to_look and torch.is_grad_enabled():
            engine.look()
    stop_looking()
    if not torch.is_grad_enabled():
        _pause_in(module)


class _CannotBeScripted(ModelError, AttributeError):
    """The hook has no name, as ``getattr()`` and ``hasattr()`` find."""


class _BeforeNextForward:
    """:func:`before_forward` as a hook of single modules, which torch.jit.script() would compile.

    It asks for its name. A model is pickled with it, and its first forward removes it.
    """

    @uncompiled
    def __call__(self, module: nn.Module, inputs: object) -> None:
        before_forward(module, inputs)

    @property
    def __name__(self) -> str:
        raise _CannotBeScripted(
            "torch.jit.script() can't compile a model whose next forward compares it with those of "
            "the other ranks, as it has got other parameters. Call it once on every rank before, "
            "as in model(x); a copy or an unpickled model anywhere."
        )


before_next_forward = _BeforeNextForward()


def stop_looking() -> None:
    """Remove the hook on forwards, unless it is to do something in the next one of some engine."""
    waiting = (e.watch.is_to_look or e.watch.refreshing is Forwards.OF_ALL for e in all_engines())
    with _lock:
        if not any(waiting):
            _remove()


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
    if not _remove():
        return

    def go_on(*_: object) -> None:
        handle.remove()
        look_later()

    handle = module.register_forward_hook(go_on, always_call=True)


def _may_train_meanwhile() -> bool:
    """Whether there are threads of the program beside this one."""
    others = [each for each in threading.enumerate() if each is not threading.current_thread()]
    return any(not each.name.startswith("lockstep-") for each in others)


@uncompiled
def refuse_distributed_autograd(module: nn.Module, _: object) -> None:
    """Refuse forwards of parallel models in a context of ``torch.distributed.autograd``.

    Other forwards, as those of a method, are refused in the backward: its errors lose their text.
    """
    if engines_of(module):
        refuse_distributed_context(type(module).__name__)
