"""Batches and outputs whose class gives them attributes, against one process on the whole batch."""

from __future__ import annotations

from collections import OrderedDict, UserDict, UserList, defaultdict, namedtuple
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.nn import DataParallel, gather, scatter

CPUS = ["cpu"] * 3


class AttrDict(dict):
    """Its items are its attributes, and the other way round."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.__dict__ = self


class Made(dict):
    """Its constructor makes an attribute of each item, and another one of their number."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name, value in self.items():
            setattr(self, name, value)
        self.twice = 2 * self.x
        self.num_rows = len(self.x)


class ByName(dict):
    def __init__(self, x: Any, y: Any) -> None:
        super().__init__(x=x, y=y)
        self.x, self.y, self.num_rows = x, y, len(x)


class Set(dict):
    """Attributes are set when it has been made."""


def _set(x: Any, y: Any) -> Set:
    made = Set(x=x, y=y)
    made.x, made.y = x, y
    return made


class Changed(Made):
    """The constructor's attribute was changed since."""


def _changed(x: Any, y: Any) -> Changed:
    made = Changed(x=x, y=y)
    made.factor = 3.0
    return made


class ReadOnly(Mapping):
    def __init__(self, items: Mapping[str, Any]) -> None:
        self._items = dict(items)

    def __getitem__(self, name: str) -> Any:
        return self._items[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    x = property(lambda self: self["x"])
    y = property(lambda self: self["y"])


class Stored(ReadOnly, MutableMapping):
    """Keeps items in a dict of its own, which a shallow copy would share."""

    def __init__(self, **items: Any) -> None:
        super().__init__(items)

    def __setitem__(self, name: str, value: Any) -> None:
        self._items[name] = value

    def __delitem__(self, name: str) -> None:
        del self._items[name]


class Slotted(dict):
    __slots__ = ("x", "y")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.x, self.y = self["x"], self["y"]


class User(UserDict):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.x, self.y = self["x"], self["y"]


class Ordered(OrderedDict):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.x, self.y = self["x"], self["y"]


class Default(defaultdict):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(list, *args, **kwargs)
        self.x, self.y = self["x"], self["y"]


class Refusing(dict):
    """Can't be changed once it is made."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        vars(self).update(self)

    def __setitem__(self, *_: Any) -> None:
        raise TypeError("read-only")

    __setattr__ = __setitem__


class Named(namedtuple("Named", "x y")):
    def __new__(cls, x: Any, y: Any) -> Named:
        made = super().__new__(cls, x, y)
        made.twice = 2 * x
        return made


class Listed(list):
    def __init__(self, values: Any) -> None:
        super().__init__(values)
        self.x, self.y = self
        self.num_rows = len(self.x)


class UserListed(UserList):
    x = property(lambda self: self[0])
    y = property(lambda self: self[1])


@dataclass
class Computed:
    x: Any
    y: Any
    twice: Any = field(init=False)

    def __post_init__(self) -> None:
        self.twice = 2 * self.x
        self.num_rows = len(self.x)


@dataclass
class Normalised:
    """To construct it a second time would divide once more."""

    x: Any
    y: Any

    def __post_init__(self) -> None:
        self.x = self.x / 255
        self.same = self.x


@dataclass(frozen=True)
class FrozenComputed:
    x: Any
    y: Any

    def __post_init__(self) -> None:
        object.__setattr__(self, "twice", 2 * self.x)


KINDS: dict[str, Callable[[Any, Any], Any]] = {
    kind.__name__: kind for kind in (ByName, Named, Computed, Normalised, FrozenComputed)
}
KINDS |= {
    kind.__name__: lambda x, y, kind=kind: kind(x=x, y=y)
    for kind in (AttrDict, Made, Stored, Slotted, User, Ordered, Default, Refusing)
}
KINDS |= {kind.__name__: lambda x, y, kind=kind: kind([x, y]) for kind in (Listed, UserListed)}
KINDS |= {
    "Set": _set,
    "Changed": _changed,
    "ReadOnly": lambda x, y: ReadOnly({"x": x, "y": y}),
    "Around": lambda x, y: AttrDict(inner=Made(x=x, y=y), x=x, y=y),
}


class Net(nn.Module):
    """Reads the batch by attribute, and returns an output of the batch's kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2, dtype=torch.float64)
        self.kind = kind

    def forward(self, batch: Any) -> Any:
        x = batch.x + batch.twice if hasattr(batch, "twice") else batch.x
        out = self.layer(x * getattr(batch, "factor", 1.0))
        return KINDS[self.kind](out.relu(), batch.y[:, None] * out)


def loss_of(output: Any) -> torch.Tensor:
    return (output.x.sum() + output.y.square().sum()).mul(0.1)


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_gradients_by_attribute_are_those_of_one_process(kind: str) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(8, 3, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    net, replicated = Net(kind), DataParallel(Net(kind), CPUS)
    replicated.load_state_dict(net.state_dict())
    results = []
    for model in (net, replicated):
        batch = KINDS[kind](x.clone().requires_grad_(), y)
        inputs = batch.x
        if not inputs.is_leaf:
            inputs.retain_grad()
        output = model(batch)
        assert torch.equal(batch.x, KINDS[kind](x, y).x), "the batch itself was changed"
        loss_of(output).backward()
        results.append((output.x, output.y, inputs.grad, *(p.grad for p in model.parameters())))
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_parts_are_the_same_by_attribute_and_by_item(kind: str) -> None:
    whole = KINDS[kind](torch.arange(24.0).view(8, 3), torch.arange(8.0))
    parts = scatter(whole, CPUS)
    joined = gather(parts, "cpu")
    assert [type(part) for part in (*parts, joined)] == [type(whole)] * 4
    assert [len(part.x) for part in parts] == [3, 3, 2]
    for name in ("x", "y", "twice"):
        if hasattr(whole, name):
            assert torch.equal(torch.cat([getattr(p, name) for p in parts]), getattr(whole, name))
            assert torch.equal(getattr(joined, name), getattr(whole, name))
    if isinstance(whole, (Mapping, list, UserList)):
        by = "x" if isinstance(whole, Mapping) else 0
        assert all(part[by] is part.x for part in (*parts, joined))


@pytest.mark.parametrize("kind", ["Made", "ByName", "Listed", "Computed"])
def test_what_the_class_computes_from_its_elements_is_computed_from_the_parts(kind: str) -> None:
    parts = scatter(KINDS[kind](torch.ones(8, 3), torch.ones(8)), CPUS)
    assert [part.num_rows for part in parts] == [3, 3, 2]
    assert gather(parts, "cpu").num_rows == 8


def test_what_a_program_has_set_is_kept() -> None:
    assert [part.factor for part in scatter(_changed(torch.ones(8, 3), torch.ones(8)), CPUS)] == [
        3.0,
        3.0,
        3.0,
    ]


def test_items_stay_attributes() -> None:
    (part, *_) = parts = scatter(AttrDict(x=torch.ones(6)), CPUS)
    part.y = 1
    assert part["y"] == 1
    joined = gather(parts[1:], "cpu")
    joined["z"] = 2
    assert joined.z == 2


def test_a_mapping_proxy_is_divided() -> None:
    parts = scatter(MappingProxyType({"x": torch.arange(6)}), CPUS)
    assert [part["x"].tolist() for part in parts] == [[0, 1], [2, 3], [4, 5]]


class Counted(dict):
    """Holds something else than it is given."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name, value in self.items():
            super().__setitem__(name, value.clone())

    def __setitem__(self, name: str, value: torch.Tensor) -> None:
        super().__setitem__(name, value.clone())

    def __copy__(self) -> Counted:
        return Counted(self)


class OfOtherTensors(dict):
    """As a TensorDict, it takes part in torch's functions."""

    @classmethod
    def __torch_function__(cls, *_: Any) -> Any:
        return NotImplemented


@pytest.mark.parametrize("kind", [Counted, OfOtherTensors])
def test_what_cannot_be_made_again_is_refused_by_name(kind: type) -> None:
    with pytest.raises(TypeError, match=rf"{kind.__name__} can't be made again with other tensors"):
        scatter(kind(x=torch.ones(4)), CPUS)


def test_a_container_in_itself_is_refused_by_name() -> None:
    batch = Set(x=torch.ones(4))
    batch.owner = batch
    with pytest.raises(TypeError, match=r"inputs\.owner is the Set around it"):
        scatter(batch, CPUS)


def test_attributes_that_only_one_replica_has_are_named() -> None:
    one, other = Set(x=torch.ones(2)), Set(x=torch.ones(2))
    other.extra = torch.ones(2)
    with pytest.raises(ValueError, match=r"not all have \.extra"):
        gather([one, other], "cpu")
