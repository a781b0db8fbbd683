"""What an optimizer notes in a step besides its state: numbers, averages, whatever it logs."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from hashlib import blake2b
from itertools import takewhile
from types import FunctionType
from typing import Any

import torch
from torch.optim import Optimizer

from lockstep.comm import bytes_of
from lockstep.optim.methods import globals_used

_Container = list[Any] | dict[Any, Any] | set[Any] | deque[Any]
# No container with more entries is kept: such as are filled in steps have few before the first.
_NUM_KEPT = 4096


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


def _record(value: Any, places: Mapping[int, int], outer: Set[int] = frozenset()) -> Any:
    """Return ``value`` as something that equals that of an equal copy; None if it isn't known.

    It is part of the values with the ids ``outer``.
    """
    if id(value) in places:
        return "parameter", places[id(value)]
    if isinstance(value, torch.Tensor):
        is_strided = value.layout is torch.strided
        if is_strided and (key := value.untyped_storage()._cdata) in places:
            return "view", places[key], value.storage_offset(), value.stride()
        with suppress(RuntimeError):  # it has no values, as on the meta device
            values = value.detach().to_dense().cpu().contiguous()
            return str(value.dtype), [*value.shape], blake2b(bytes_of(values)).digest()
        return None
    if id(value) in outer:
        return None
    inner = {*outer, id(value)}
    if isinstance(value, Mapping):
        return {_key(k, places): _record(v, places, inner) for k, v in [*value.items()]}
    if isinstance(value, list | tuple | deque):
        return [_record(each, places, inner) for each in value]
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
    noted = _small_containers(_noted_by(kind))
    inner = _small_containers(one for each in noted for one in _values_in(each))
    found: dict[int, _Container] = {id(each): each for each in noted + inner}
    before = [(each, each.copy()) for each in found.values()]
    try:
        yield
    finally:
        for each, contents in before:
            if [*map(id, _values_in(each))] != [*map(id, _values_in(contents))]:
                each.clear()
                (each.update if isinstance(each, dict | set) else each.extend)(contents)


def _noted_by(kind: type[Optimizer]) -> Iterator[object]:
    """Yield what the attributes of ``kind`` and the names in its functions stand for."""
    for each in takewhile(lambda each: each is not Optimizer, kind.__mro__):
        if each.__module__.startswith("torch."):
            continue
        yield from vars(each).values()
        for function in filter(inspect.isfunction, map(inspect.unwrap, _functions_of(each))):
            for cell in function.__closure__ or ():
                with suppress(ValueError):  # it is empty
                    yield cell.cell_contents
            yield from globals_used(function)


def _functions_of(kind: type) -> list[Any]:
    return [value for value in vars(kind).values() if isinstance(value, FunctionType)]


def _small_containers(values: Iterable[object]) -> list[_Container]:
    return [
        value
        for value in values
        if isinstance(value, list | dict | set | deque) and len(value) <= _NUM_KEPT
    ]


def _values_in(value: _Container) -> list[Any]:
    return [*value.keys(), *value.values()] if isinstance(value, dict) else [*value]
