"""All tensors in a value, and other ones in their place."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import TypeVar, cast

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from lockstep.nn.replicas.nested import children, like

T = TypeVar("T")
Change = Callable[[torch.Tensor], torch.Tensor | None]

# What has attributes, but none that are part of a value.
_NO_VALUES = (nn.Module, type, ModuleType, FunctionType, MethodType, BuiltinFunctionType)


def map_tensors(change: Change, value: T) -> T:
    """``value`` with every tensor in it changed, those that are attributes of objects included.

    Args:
        change: What takes a tensor's place; None for itself.
        value: Any value. It is left as it is, and what holds no tensor that changes is not copied.
    """
    return cast(T, _changed(change, value, {}))


def _changed(change: Change, value: object, done: dict[int, object]) -> object:
    if isinstance(value, torch.Tensor):
        new = change(value)
        return value if new is None else new
    if isinstance(value, PackedSequence):
        data = change(value.data)
        return value if data is None else value._replace(data=data)
    if id(value) in done:  # an object may know the one that holds it
        return done[id(value)]
    inside = children(value)
    if inside is None:
        return _changed_object(change, value, done)
    done[id(value)] = value
    new_inside = [_changed(change, child, done) for child in inside.values()]
    if all(new is old for new, old in zip(new_inside, inside.values(), strict=True)):
        return value
    done[id(value)] = made = like(value, new_inside)
    return made


def _changed_object(change: Change, value: object, done: dict[int, object]) -> object:
    state = getattr(value, "__dict__", None)
    if not state or isinstance(value, _NO_VALUES):
        return value
    done[id(value)] = value
    new_state = {name: _changed(change, held, done) for name, held in state.items()}
    if all(new_state[name] is held for name, held in state.items()):
        return value
    made = copy.copy(value)
    made.__dict__.update(new_state)
    done[id(value)] = made
    return made


def tensors_in(value: object) -> list[torch.Tensor]:
    """All tensors in ``value``, in the order of :func:`map_tensors`."""
    found: list[torch.Tensor] = []
    map_tensors(found.append, value)
    return found
