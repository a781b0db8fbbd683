"""Containers of all kinds, and how to compare and to draw them."""

from __future__ import annotations

import functools
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from hypothesis import strategies as st
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence

Point = namedtuple("Point", ["x", "y"])


class Pair(tuple):
    """Its ``__new__`` takes something else than a tuple does."""

    __slots__ = ()

    def __new__(cls, one: Any, other: Any) -> Pair:
        return super().__new__(cls, (one, other))


class Row(list):
    name = "none"


@dataclass
class Batch:
    """Constructing it a second time would double what it has twice."""

    data: Any
    label: Any = None
    twice: Any = field(init=False)
    later: Any = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.data = (self.data, self.data)
        self.twice = self.label

    @functools.cached_property
    def total(self) -> torch.Tensor:
        return self.data[0].sum()


@dataclass(frozen=True)
class Frozen:
    data: Any
    label: Any


@dataclass(frozen=True, slots=True)
class FrozenSlots:
    data: Any
    label: Any


@dataclass(slots=True)
class Slots:
    data: Any
    label: Any


@dataclass
class Output(OrderedDict):
    """As Hugging Face's: fields that aren't None are items, and some methods are refused."""

    loss: Any = None
    logits: Any = None

    def __post_init__(self) -> None:
        for item in fields(self):
            if getattr(self, item.name) is not None:
                self[item.name] = getattr(self, item.name)

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def update(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError("not this one")

    def __reduce__(self) -> Any:
        kind, _, *rest = super().__reduce__()
        return kind, tuple(getattr(self, item.name) for item in fields(self)), *rest


def _default(one: Any, other: Any) -> defaultdict[str, Any]:
    return defaultdict(list, one=one, other=other)


def _extreme(one: Any, other: Any) -> Any:
    return torch.return_types.max((one, other))


# Each makes a container of two children. The first ones are those that torch knows as well.
KNOWN_TO_TORCH = {
    "tuple": lambda a, b: (a, b),
    "list": lambda a, b: [a, b],
    "dict": lambda a, b: {"one": a, 2: b},
    "ordered": lambda a, b: OrderedDict([("b", a), ("a", b)]),
    "named": Point,
}
CONTAINERS = KNOWN_TO_TORCH | {
    "row": lambda a, b: Row([a, b]),
    "pair": Pair,
    "default": _default,
    "user": lambda a, b: UserDict(one=a, other=b),
    "extreme": _extreme,
    "output": lambda a, b: Output(a) if b is None else Output(a, b),
    "batch": Batch,
    "frozen": Frozen,
    "frozen slots": FrozenSlots,
    "slots": Slots,
}


def same(one: Any, other: Any) -> bool:
    """Whether types, structure and all values are the same."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, PackedSequence):
        return all(map(torch.equal, pad_packed_sequence(one), pad_packed_sequence(other)))
    if isinstance(one, (dict, UserDict)):
        kinds = getattr(one, "default_factory", 0), getattr(other, "default_factory", 0)
        return (
            list(one) == list(other)
            and kinds[0] == kinds[1]
            and same([*one.values()], [*other.values()])
            and same(_attributes(one), _attributes(other))
        )
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(same, one, other))
    if hasattr(one, "__dataclass_fields__"):
        return same(_attributes(one), _attributes(other))
    return one == other


def _attributes(value: Any) -> list[Any]:
    names = [item.name for item in fields(value)] if hasattr(value, "__dataclass_fields__") else []
    return [(name, getattr(value, name)) for name in names if hasattr(value, name)]


def tensors(value: Any) -> list[torch.Tensor]:
    """All tensors in a nesting, in some order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, PackedSequence):
        return [value.data]
    if isinstance(value, (dict, UserDict)):
        value = list(value.values())
    elif hasattr(value, "__dataclass_fields__"):
        value = [held for _, held in _attributes(value)]
    return [t for held in value for t in tensors(held)] if isinstance(value, (tuple, list)) else []


@st.composite
def rows_of(draw: st.DrawFn, rows: int, dim: int) -> torch.Tensor:
    """A tensor that has so many rows along ``dim``."""
    ndim = draw(st.integers(dim + 1 if dim >= 0 else -dim, 3))
    shape = [draw(st.integers(1, 3)) for _ in range(ndim)]
    shape[dim] = rows
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


@st.composite
def sequences(draw: st.DrawFn, number: int) -> PackedSequence:
    """So many packed sequences, sorted or not."""
    lengths = [draw(st.integers(1, 4)) for _ in range(number)]
    if in_order := draw(st.booleans()):
        lengths.sort(reverse=True)
    parts = [torch.randn(length, 2, dtype=torch.float64, requires_grad=True) for length in lengths]
    return pack_sequence(parts, enforce_sorted=in_order)


def nestings(rows: int, dim: int) -> st.SearchStrategy[Any]:
    """Nestings of tensors with so many rows, and of other things."""
    leaves = rows_of(rows, dim) | st.sampled_from([None, 3, "name", 0.5, (), [], {}, (1, 2)])
    if rows:
        leaves |= sequences(rows)
    return st.recursive(leaves, _containers_of(CONTAINERS), max_leaves=6)


def nestings_for_torch(rows: int, dim: int) -> st.SearchStrategy[Any]:
    """Nestings that torch can scatter and gather, too."""
    leaves = rows_of(rows, dim) | st.none()
    return st.recursive(leaves, _containers_of(KNOWN_TO_TORCH), max_leaves=6)


def _containers_of(kinds: dict[str, Any]) -> Any:
    return lambda inner: st.sampled_from(list(kinds)).flatmap(
        lambda kind: st.builds(kinds[kind], inner, inner)
    )
