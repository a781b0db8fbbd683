"""Nested containers of tensors: their children, their leaves, and copies with other tensors."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from collections import UserList, deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple, TypeVar, cast

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
_PLAIN = (dict, list, tuple)  # they have no attributes
_LISTS = (list, deque, UserList)
# Objects whose attributes aren't searched for tensors.
_NO_VALUES = (nn.Module, type, ModuleType, FunctionType, MethodType, BuiltinFunctionType)


class Attribute(NamedTuple):
    """The key of an attribute that a container has beside its elements."""

    name: str


def children(value: object) -> dict[object, object] | None:
    """The children of a container by index, key or name of the field; None for a leaf.

    Containers are lists, deques, tuples of all kinds, mappings, and dataclasses, those of attrs
    too. Their other attributes are children as well, each by an :class:`Attribute`, for they may
    hold tensors: those of the elements once more, or others. So are a dataclass's fields that its
    constructor doesn't take. Cached properties are left out.
    """
    elements = _elements(value)
    if elements is None or type(value) in _PLAIN:
        return elements
    return elements | {Attribute(name): held for name, held in _attributes(value).items()}


def _elements(value: object) -> dict[object, object] | None:
    if isinstance(value, _WHOLE):
        return None
    if isinstance(value, (tuple, *_LISTS)):
        return dict(enumerate(value))
    # Before dataclasses, as some are both: the model outputs of Hugging Face, whose items are
    # those of their fields that are not None.
    if isinstance(value, Mapping):
        return dict(value.items())
    if (names := _fields(type(value))) is None:
        return None
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def _fields(kind: type) -> dict[str, str] | None:
    """The fields that a dataclass is constructed from, with their names as arguments."""
    if dataclasses.is_dataclass(kind):
        return {field.name: field.name for field in dataclasses.fields(kind) if field.init}
    if (of_attrs := getattr(kind, "__attrs_attrs__", None)) is not None:
        return {field.name: field.alias for field in of_attrs if field.init}
    return None


def _has_itself_as_dict(value: object) -> bool:
    """Whether ``self.__dict__ = self`` makes the items of a dict its attributes."""
    return isinstance(value, dict) and bool(type(value).__dictoffset__) and vars(value) is value


def _attributes(value: object) -> dict[str, object]:
    """What is in ``__dict__`` and ``__slots__`` besides elements and cached properties."""
    # Not the class's own __getstate__, which may add to it or leave something out.
    state = object.__getstate__(value)
    in_dict, in_slots = state if isinstance(state, tuple) else (state, None)
    held = {} if _has_itself_as_dict(value) else dict(in_dict or {})
    held |= in_slots or {}
    elements = () if isinstance(value, Mapping) else _fields(type(value)) or ()
    return {
        name: attribute
        for name, attribute in held.items()
        if name not in elements and not _is_cached(value, name)
    }


def _is_cached(value: object, name: str) -> bool:
    """Whether the attribute was computed once from the others, and can be again."""
    return isinstance(getattr(type(value), name, None), functools.cached_property)


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
    return str(path[0]) + "".join(
        key_of(key) if isinstance(key, Attribute) else f"[{key!r}]" for key in path[1:]
    )


def num_elements(inside: Mapping[object, object]) -> int:
    """Return how many children are elements, and no other attributes."""
    return sum(not isinstance(key, Attribute) for key in inside)


def key_of(key: object) -> str:
    """Return a child's key as errors name it."""
    return f".{key.name}" if isinstance(key, Attribute) else repr(key)


def follows_its_class(value: object) -> bool:
    """Whether its class makes the attributes of ``value`` from its elements.

    Then a part has the attributes that its class makes from the part's elements, such as their
    number. It is tried: a program may have set attributes, or changed them, later.
    """
    inside = children(value) or {}
    elements, attributes = _divided(inside)
    kept = {id(child) for child in elements.values()}
    if all(id(attribute) in kept for attribute in attributes.values()):
        return False  # a copy has them
    again = children(_constructed(type(value), elements))
    return again is not None and list(again) == list(inside) and _alike(again, inside)


def like(value: _T, new: Sequence[object], *, by_class: bool = False) -> _T:
    """A container of the type of ``value``, with other children in the same order.

    It is a shallow copy with replaced children, and isn't constructed: ``__post_init__`` would be
    applied to its own results. With ``by_class`` it is constructed from its elements, unless
    they come out as others.

    Raises:
        TypeError: If it can't be made with these children.
    """
    kind: Any = type(value)
    inside = dict(zip(children(value) or (), new, strict=True))
    elements, attributes = _divided(inside)
    if kind in _PLAIN:
        return cast(_T, kind(elements if kind is dict else elements.values()))
    if by_class and _has(made := _constructed(kind, elements), elements):
        return cast(_T, made)
    # Tensors of another kind than torch's, as in a TensorDict, know more of their elements than
    # is seen here, such as the size of the batch.
    if not hasattr(kind, "__torch_function__"):
        for make in (_copied, _made_anew):
            # Any error: a class may refuse to be copied, or to be given elements.
            with contextlib.suppress(Exception):
                if _has(made := make(value, elements, attributes), inside):
                    return cast(_T, made)
    raise TypeError(
        f"A {kind.__module__}.{kind.__qualname__} can't be made again with other tensors: neither "
        f"a copy of it nor {kind.__name__}(...) holds what it is given. Pass on its tensors in a "
        "dict, tuple or dataclass."
    )


def _divided(inside: Mapping[Any, object]) -> tuple[dict[Any, object], dict[str, object]]:
    """The elements among a container's children, and its attributes by name."""
    elements = {key: child for key, child in inside.items() if not isinstance(key, Attribute)}
    named = {key.name: child for key, child in inside.items() if isinstance(key, Attribute)}
    return elements, named


def _constructed(kind: Any, elements: dict[Any, object]) -> object:
    """An object of the class ``kind`` with these elements; None if it can't be made of them."""
    values = list(elements.values())
    with contextlib.suppress(Exception):  # it may take something else, and raise anything
        if issubclass(kind, Mapping) and not dataclasses.is_dataclass(kind):
            with contextlib.suppress(TypeError):
                return kind(elements)
            return kind(**elements)
        if issubclass(kind, tuple):
            return kind(*values) if hasattr(kind, "_fields") else kind(values)
        if issubclass(kind, _LISTS):
            return kind(values)
        arguments = _fields(kind) or {}
        return kind(**{arguments[name]: child for name, child in elements.items()})
    return None


def _made_anew(value: object, elements: dict[Any, object], _: dict[str, object]) -> object:
    return _constructed(type(value), elements)


def _copied(value: Any, elements: dict[Any, object], attributes: dict[str, object]) -> object:
    kind = type(value)
    if isinstance(value, tuple):
        # The __new__ of named tuples takes the fields one by one, so it is bypassed. That of
        # torch.return_types takes them all, and can't be bypassed.
        insists = hasattr(value, "n_sequence_fields") and not hasattr(value, "_fields")
        made: Any = (kind if insists else functools.partial(tuple.__new__, kind))(elements.values())
    else:
        made = copy.copy(value)
        if made is value:  # as what can't be changed says
            return None
    # First, for they may be what holds the elements, and a copy shares them with the original.
    _set_attributes(made, value, attributes)
    _set_elements(made, elements)
    return made


def _set_attributes(made: Any, value: object, attributes: Mapping[str, object]) -> None:
    if _has_itself_as_dict(value):
        object.__setattr__(made, "__dict__", made)
    elif hasattr(made, "__dict__"):
        for name in list(vars(made)):
            if _is_cached(made, name):
                del vars(made)[name]
    for name, child in attributes.items():
        # Not setattr(), by which a dict may set an item as well.
        if name in getattr(value, "__dict__", ()):
            vars(made)[name] = child
        else:
            object.__setattr__(made, name, child)


def _set_elements(made: Any, elements: Mapping[Any, object]) -> None:
    kind = type(made)
    if isinstance(made, _LISTS):
        if [*map(id, made)] != [*map(id, elements.values())]:
            made.clear()
            made.extend(elements.values())
    elif isinstance(made, MutableMapping):
        # One by one: a ModelOutput of Hugging Face refuses update().
        for key, child in elements.items():
            if made[key] is not child:
                made[key] = child
    elif not isinstance(made, (tuple, Mapping)):
        # Those of attrs are as they are: its setters may convert.
        is_plain = dataclasses.is_dataclass(kind) and not kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
        for name, child in elements.items():
            (setattr if is_plain else object.__setattr__)(made, name, child)


def _has(made: object, wanted: Mapping[Any, object]) -> bool:
    """Whether ``made`` has these children, or these elements, with the very same tensors."""
    inside = children(made)
    if inside is None:
        return False
    if not any(isinstance(key, Attribute) for key in wanted):
        inside = _divided(inside)[0]
    return inside.keys() == wanted.keys() and _alike(inside, wanted)


def _alike(one: Mapping[Any, object], other: Mapping[Any, object]) -> bool:
    """Whether elements are the same tensors, and attributes are equal."""
    for key, child in one.items():
        if child is other[key]:
            continue
        mine, others = list(leaves(child)), list(leaves(other[key]))
        if [path for path, _ in mine] != [path for path, _ in others]:
            return False
        compare = _equal if isinstance(key, Attribute) else _same
        if not all(compare(leaf, its) for (_, leaf), (_, its) in zip(mine, others, strict=True)):
            return False
    return True


def _same(one: object, other: object) -> bool:
    return one is other or (
        not isinstance(one, (torch.Tensor, PackedSequence)) and equal(one, other)
    )


def _equal(one: object, other: object) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return equal(one, other)
    with contextlib.suppress(Exception):  # those of some kinds can't be compared
        return one is other or (one.dtype == other.dtype and torch.equal(one, other))
    return False


def equal(one: object, other: object) -> bool:
    """Whether two leaves are one object, or say that they are equal."""
    if one is other:
        return True
    try:
        answer = one == other
    except Exception:
        return False
    # NumPy's bool was renamed, hence both names. Arrays and symbolic expressions return no bool
    # for ==, and count as different.
    return type(answer).__name__ in ("bool", "bool_") and bool(answer)


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
