"""Values inside values: what of an input or an output is a container, and how to make one alike."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections import deque
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

_T = TypeVar("_T")

# The keys that lead from a nesting to a value in it.
Path = tuple[object, ...]

# Some of these are tuples or may be dataclasses, but none can be taken apart: a Size takes nothing
# but numbers, and a PackedSequence's fields belong together.
_WHOLE = (torch.Tensor, PackedSequence, torch.Size, nn.Module, type)


def children(value: object) -> dict[object, object] | None:
    """What a container holds, by index, key or name of the field; None for all that is a leaf.

    Containers are lists, deques, tuples of all kinds, mappings that can be changed, and
    dataclasses.
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
    """A container as ``value`` is, its type and all, with other children in the same order.

    It is a copy, filled again, and not constructed: ``__post_init__`` would do a second time what
    it has done to the children of the first.
    """
    if isinstance(value, tuple):
        # The __new__ of named tuples takes the fields one by one, so they go without. That of
        # torch.return_types takes them all, and there is no going without.
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


def leaves(value: object) -> Iterator[tuple[Path, object]]:
    """All in a nesting that is no container, each with its path."""
    return _leaves(value, (), frozenset())


def _leaves(value: object, path: Path, above: frozenset[int]) -> Iterator[tuple[Path, object]]:
    inside = children(value)
    if inside is None:
        yield path, value
    # An object may know the one that holds it: nothing new is in there.
    elif id(value) not in above:
        above |= {id(value)}
        for key, child in inside.items():
            yield from _leaves(child, (*path, key), above)


def name_of(path: Path) -> str:
    """How to write a path, as in ``inputs[0]['mask']``."""
    return str(path[0]) + "".join(f"[{key!r}]" for key in path[1:])


def _set_fields(value: Any, fields: Mapping[Any, object]) -> None:
    for name in list(getattr(value, "__dict__", ())):
        # Computed from the fields, once: now it has to be again.
        if isinstance(getattr(type(value), name, None), functools.cached_property):
            del value.__dict__[name]
    assign = object.__setattr__ if value.__dataclass_params__.frozen else setattr
    for name, child in fields.items():
        assign(value, name, child)
