"""Nested containers of tensors, and copies of them with other tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import TypeVar, cast

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from lockstep.nn.replicas.containers import children, like

_T = TypeVar("_T")

# Returns the tensor that replaces its argument, or None to keep that.
Change = Callable[[torch.Tensor], torch.Tensor | None]

# Objects whose attributes aren't searched for tensors.
_NO_VALUES = (nn.Module, type, ModuleType, FunctionType, MethodType, BuiltinFunctionType)


def map_tensors(change: Change, value: _T) -> _T:
    """Return a copy of ``value`` with all tensors changed, also in attributes of objects.

    Each tensor is changed once, wherever it is met. Containers and objects in which no tensor
    changes are shared with ``value``, not copied.
    """
    return cast(_T, _changed(change, value, {}))


def _changed(change: Change, value: object, done: dict[int, tuple[object, object]]) -> object:
    """``done`` are values by id, kept so that no other gets their id, and what they became."""
    if id(value) in done:
        return done[id(value)][1]
    new = value
    if isinstance(value, torch.Tensor):
        new = change(value)
        new = value if new is None else new
    elif isinstance(value, PackedSequence):
        data = change(value.data)
        new = value if data is None else value._replace(data=data)
    else:
        done[id(value)] = value, value  # an object may refer to its own container
        new = _changed_inside(change, value, done)
    done[id(value)] = value, new
    return new


def _changed_inside(
    change: Change, value: object, done: dict[int, tuple[object, object]]
) -> object:
    inside = children(value)
    attributes: dict[str, object] | None = None
    if inside is None and not isinstance(value, _NO_VALUES):
        attributes = getattr(value, "__dict__", None)
        inside = cast("dict[object, object] | None", attributes)
    if not inside:
        return value
    new = {key: _changed(change, child, done) for key, child in inside.items()}
    if all(new[key] is child for key, child in inside.items()):
        return value
    if attributes is None:
        return like(value, list(new.values()))
    made = copy.copy(value)
    vars(made).update(cast(dict[str, object], new))
    return made


def tensors_in(value: object) -> list[torch.Tensor]:
    """Return all tensors in ``value``, each once, in the order of :func:`map_tensors`."""
    found: list[torch.Tensor] = []
    map_tensors(found.append, value)
    return found
