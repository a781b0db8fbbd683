"""Nested containers of tensors: their children, their leaves, and copies with other tensors."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

_T = TypeVar("_T")

# The keys that lead from a nested container to a value in it.
Path = tuple[object, ...]
# Returns the tensor that replaces its argument, or None to keep that.
Change = Callable[[torch.Tensor], torch.Tensor | None]

# Leaves, though some are tuples or may be dataclasses: a Size has only numbers, and the fields of a
# PackedSequence depend on each other.
_WHOLE = (torch.Tensor, PackedSequence, torch.Size, nn.Module, type)
# Objects whose attributes aren't searched for tensors.
_NO_VALUES = (nn.Module, type, ModuleType, FunctionType, MethodType, BuiltinFunctionType)


def children(value: object) -> dict[object, object] | None:
    """The children of a container by index, key or name of the field; None for a leaf.

    Containers are lists, deques, tuples of all kinds, mutable mappings, and dataclasses.
    """
    if isinstance(value, _WHOLE):
        return None
    if isinstance(value, (tuple, list, deque)):
        return dict(enumerate(value))
    # Before dataclasses, as some are both: the model outputs of Hugging Face, whose items are
    # those of their fields that are not None.
    if isinstance(value, MutableMapping):
        return dict(value.items())
    if dataclasses.is_dataclass(value):
        # A field that init=False leaves to be set later may not be there yet.
        names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        return {name: getattr(value, name) for name in names}
    return None


def like(value: _T, new: Sequence[object]) -> _T:
    """A container of the type of ``value``, with other children in the same order.

    It is a shallow copy with replaced children, and isn't constructed: ``__post_init__`` would be
    applied to its own results.
    """
    if isinstance(value, tuple):
        # The __new__ of named tuples takes the fields one by one, so it is bypassed. That of
        # torch.return_types takes them all, and can't be bypassed.
        insists = hasattr(value, "n_sequence_fields") and not hasattr(value, "_fields")
        return cast(_T, type(value)(new) if insists else tuple.__new__(type(value), new))
    other: Any = copy.copy(value)
    if isinstance(other, (list, deque)):
        other.clear()
        other.extend(new)
        return cast(_T, other)
    named = zip(children(value) or (), new, strict=True)
    if isinstance(other, MutableMapping):
        for key, child in named:  # one by one: a ModelOutput of Hugging Face refuses update()
            other[key] = child
    else:
        _set_fields(other, dict(named))
    return cast(_T, other)


def _set_fields(value: Any, fields: Mapping[Any, object]) -> None:
    for name in list(getattr(value, "__dict__", ())):
        # Computed once from the old fields.
        if isinstance(getattr(type(value), name, None), functools.cached_property):
            del value.__dict__[name]
    assign = object.__setattr__ if value.__dataclass_params__.frozen else setattr
    for name, child in fields.items():
        assign(value, name, child)


def leaves(
    value: object, path: Path = (), above: frozenset[int] = frozenset()
) -> Iterator[tuple[Path, object]]:
    """Yield all leaves with their paths; ``above`` are the ids of the containers around."""
    inside = children(value)
    if inside is None:
        yield path, value
    elif id(value) not in above:  # an object may refer to its own container
        above |= {id(value)}
        for key, child in inside.items():
            yield from leaves(child, (*path, key), above)


def name_of(path: Path) -> str:
    """Return a path as an expression, such as ``inputs[0]['mask']``."""
    return str(path[0]) + "".join(f"[{key!r}]" for key in path[1:])


def map_tensors(change: Change, value: _T) -> _T:
    """Return a copy of ``value`` with all tensors changed, also in attributes of objects.

    Containers and objects in which no tensor changes are shared with ``value``, not copied.
    """
    return cast(_T, _changed(change, value, {}))


def _changed(change: Change, value: object, done: dict[int, object]) -> object:
    if isinstance(value, torch.Tensor):
        new = change(value)
        return value if new is None else new
    if isinstance(value, PackedSequence):
        data = change(value.data)
        return value if data is None else value._replace(data=data)
    if id(value) in done:  # an object may refer to its own container
        return done[id(value)]
    inside = children(value)
    attributes: dict[str, object] | None = None
    if inside is None and not isinstance(value, _NO_VALUES):
        attributes = getattr(value, "__dict__", None)
        inside = cast("dict[object, object] | None", attributes)
    if not inside:
        return value
    done[id(value)] = value
    new_inside = {key: _changed(change, child, done) for key, child in inside.items()}
    if all(new_inside[key] is child for key, child in inside.items()):
        return value
    if attributes is None:
        made = like(value, list(new_inside.values()))
    else:
        made = copy.copy(value)
        vars(made).update(cast(dict[str, object], new_inside))
    done[id(value)] = made
    return made


def tensors_in(value: object) -> list[torch.Tensor]:
    """Return all tensors in ``value``, in the order of :func:`map_tensors`."""
    found: list[torch.Tensor] = []
    map_tensors(found.append, value)
    return found
