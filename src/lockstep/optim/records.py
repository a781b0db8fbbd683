"""What an optimizer notes in a step besides its state: numbers, averages, whatever it logs."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import takewhile
from types import FunctionType
from typing import Any

import torch
from torch.optim import Optimizer

from lockstep.comm import bytes_of
from lockstep.optim.methods import code_names

_Container = list[Any] | dict[Any, Any] | set[Any] | deque[Any]


def records_of(optimizer: Optimizer, stand_ins: Sequence[torch.Tensor]) -> dict[str, Any]:
    """Return its options and attributes, as far as they can be compared with a copy's.

    Parameters, of which each copy has its own ``stand_ins``, and views of them are represented by
    their places.
    """
    places = {id(p): index for index, p in enumerate(stand_ins)}
    places |= {p.untyped_storage()._cdata: index for index, p in enumerate(stand_ins)}
    found = {
        f"group[{name!r}]" + f" of group {index}" * bool(index): _record(value, places)
        for index, group in enumerate(optimizer.param_groups)
        for name, value in group.items()
        if name not in ("params", "param_names")
    }
    for name, value in vars(optimizer).items():
        if name not in ("state", "param_groups") and not name.endswith("_hooks"):
            found[f"its {name}"] = _record(value, places)
    return found


def _record(value: Any, places: Mapping[int, int]) -> Any:
    """Return ``value`` as something that equals that of an equal copy; None if it isn't known."""
    if id(value) in places:
        return "parameter", places[id(value)]
    if isinstance(value, torch.Tensor):
        is_strided = value.layout is torch.strided
        if is_strided and (key := value.untyped_storage()._cdata) in places:
            return "view", places[key], value.storage_offset(), value.stride()
        values = value.detach().to_dense().cpu().contiguous()
        return str(value.dtype), [*value.shape], bytes(bytes_of(values))
    if isinstance(value, Mapping):
        return {_key(k, places): _record(v, places) for k, v in [*value.items()]}
    if isinstance(value, list | tuple | deque):
        return [_record(each, places) for each in value]
    if isinstance(value, set | frozenset):
        return {repr(_key(each, places)) for each in value}
    return repr(value) if isinstance(value, str | bytes | int | float | complex) else None


def _key(key: Any, places: Mapping[int, int]) -> Any:
    place = places.get(key if type(key) is int else id(key))
    return key if place is None else ("parameter", place)


@contextmanager
def kept(kind: type[Optimizer]) -> Iterator[None]:
    """Put back afterwards what functions of ``kind`` may note elsewhere: in lists and the like.

    These are those in attributes of the class, and those that its functions refer to.
    """
    found: dict[int, _Container] = {}
    for value in _noted_by(kind):
        _add_containers(value, found)
    before = [(each, each.copy()) for each in found.values()]
    try:
        yield
    finally:
        for each, contents in before:
            each.clear()
            (each.update if isinstance(each, dict | set) else each.extend)(contents)


def _noted_by(kind: type[Optimizer]) -> Iterator[object]:
    """Yield what the attributes of ``kind`` and the names in its functions stand for."""
    for each in takewhile(lambda each: each is not Optimizer, kind.__mro__):
        if each.__module__.startswith("torch."):
            continue
        yield from vars(each).values()
        for function in filter(inspect.isfunction, map(inspect.unwrap, _functions_of(each))):
            yield from inspect.getclosurevars(function).nonlocals.values()
            yield from map(function.__globals__.get, code_names(function))


def _functions_of(kind: type) -> list[Any]:
    return [value for value in vars(kind).values() if isinstance(value, FunctionType)]


def _add_containers(value: object, found: dict[int, _Container]) -> None:
    """Add ``value`` to ``found``, and those in it, if it is a container."""
    if isinstance(value, list | dict | set | deque) and id(value) not in found:
        found[id(value)] = value
        for each in value.values() if isinstance(value, dict) else value:
            _add_containers(each, found)
