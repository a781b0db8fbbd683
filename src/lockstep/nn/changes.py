"""Noticing that a parallel model has got other parameters.

torch calls global hooks when a parameter or a module is put into a module. They mark the engine of
the model that it is put into, and then, before the next forward of any part of that model, the
engine takes up what is new. Between changes none of this costs anything.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules import module as hooks
from torch.utils.hooks import RemovableHandle

from lockstep.comm.uncompiled import uncompiled
from lockstep.errors import AlreadyParallel
from lockstep.nn.distributed_autograd import refuse_distributed_autograd
from lockstep.nn.wrapper import Wrapper

if TYPE_CHECKING:
    from lockstep.nn.engine import Engine

# Bound early, as ours may be put in its place.
_TorchDDP = nn.parallel.DistributedDataParallel
# Ranks may be threads, and a set that another thread changes can't be gone through.
_lock = threading.RLock()
# In the order in which they were made.
_engines: weakref.WeakKeyDictionary[Engine, None] = weakref.WeakKeyDictionary()
_num_watched = 0
# Which engines look after each module.
_watched: weakref.WeakKeyDictionary[nn.Module, weakref.WeakSet[Engine]] = (
    weakref.WeakKeyDictionary()
)
_registration_hooks: list[RemovableHandle] = []
# By the forms of their parameters, the class names of models that are or were parallel; None of
# those that have been asked for.
_names_by_form: dict[frozenset[tuple[object, int]], str | None] = {}
_refusal: RemovableHandle | None = None
_stale: weakref.WeakSet[Engine] = weakref.WeakSet()
_forward_hooks: list[RemovableHandle] = []


def watch(engine: Engine) -> None:
    """From now on notice what is put into the modules of ``engine``."""
    global _num_watched, _refusal
    with _lock:
        if not _registration_hooks:
            for register in (
                hooks.register_module_parameter_registration_hook,
                hooks.register_module_module_registration_hook,
                hooks.register_module_buffer_registration_hook,
            ):
                _registration_hooks.append(register(_is_put_into))
        if _refusal is None:
            _refusal = refuse_distributed_autograd(lambda module: bool(_watched.get(module)))
        _engines[engine] = None
        _num_watched += 1
        if engine.module is not None:
            _watch_parts(engine, engine.module)
            _names_by_form.setdefault(_form_of(engine.parameters), type(engine.module).__name__)


def unwatch(engine: Engine) -> None:
    """Let changes, and optimizers, be no matter of ``engine`` any more."""
    global _num_watched
    with _lock:
        _engines.pop(engine, None)
        _names_by_form.pop(_form_of(engine.parameters), None)
        _stale.discard(engine)
        _num_watched += 1
        for engines in _watched.values():
            engines.discard(engine)


def mark_stale(engine: Engine) -> None:
    """Let ``engine`` look at its module anew before the next forward of any of its parts."""
    with _lock:
        engine.is_stale = True
        _stale.add(engine)
        if not _forward_hooks:
            _forward_hooks.append(hooks.register_module_forward_pre_hook(_before_forward))


def num_watched() -> int:
    """How often an engine has come or gone."""
    return _num_watched


def engines_with(parameters: Iterable[torch.Tensor]) -> list[Engine]:
    """The engines that look after some of ``parameters``, in the order in which they were made."""
    wanted = {id(parameter) for parameter in parameters}
    with _lock:
        return [engine for engine in _engines if engine.looks_after(wanted)]


def parallel_model_like(parameters: Iterable[torch.Tensor]) -> str | None:
    """The name of a parallel model whose parameters have the forms of ``parameters``; only once."""
    form = _form_of(parameters)
    with _lock:
        name = _names_by_form.get(form)
        if name is not None:
            _names_by_form[form] = None
    return name


def _form_of(parameters: Iterable[torch.Tensor]) -> frozenset[tuple[object, int]]:
    return frozenset(Counter((p.shape, p.dtype) for p in parameters if p.requires_grad).items())


def _watch_parts(engine: Engine, module: nn.Module) -> None:
    for part in module.modules():
        _watched.setdefault(part, weakref.WeakSet()).add(engine)


@uncompiled
def _is_put_into(module: nn.Module, name: str, value: object) -> None:
    if name in module._buffers:
        return  # a buffer that was there before, as many forwards set them
    if isinstance(module, _TorchDDP) and not isinstance(module, Wrapper):
        _refuse_second_reduction(value)
    with _lock:
        for engine in list(_watched.get(module, ())):
            if isinstance(value, nn.Module):
                _watch_parts(engine, value)
            mark_stale(engine)


def _refuse_second_reduction(value: object) -> None:
    """Raise if torch's wrapper, which is being constructed, would reduce what engines reduce.

    Both reduce in the memory of ``.grad``, so that gradients are divided twice, or some are.
    """
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
def _before_forward(module: nn.Module, _: Any) -> None:
    with _lock:
        stale = [engine for engine in _watched.get(module, ()) if engine.is_stale]
    for engine in stale:
        engine.refresh()  # without the lock, as it waits for the other ranks
    with _lock:
        if not any(engine.is_stale for engine in _stale):
            _stale.clear()
            while _forward_hooks:
                _forward_hooks.pop().remove()
