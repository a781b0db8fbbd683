"""Trains with optimizers of a package, sharded and in one process, and says how each ended."""

from __future__ import annotations

import importlib
import inspect
import io
import random
import re
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import redirect_stdout
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

import lockstep
from lockstep.errors import ModelError
from tests.clients.torchvision import stand_in_for_torchvision
from tests.clients.toy import place

MODULES = {
    "torch": "torch.optim",
    "timm": "timm.optim",
    "pytorch_optimizer": "pytorch_optimizer",
    "prodigyopt": "prodigyopt",
    "dadaptation": "dadaptation",
    "schedulefree": "schedulefree",
    "heavyball": "heavyball",
    "prodigy-plus-schedule-free": "prodigyplus",
}
_NUM_STEPS = 20
# By step: most at one scale, then on both sides of thresholds such as those of clipping.
_SCALES = [1.0] * 6 + [2.0**-8, 2.0**6, 1.0, 2.0**-3]
_TOLD = re.compile(r"can't be divided among the ranks: (.*)\. So each rank updates", re.DOTALL)


class Ending(NamedTuple):
    """How training with an optimizer ended.

    Attributes:
        outcome: "divided", "undivided" or "refused"; "not run" if one process can't; else "wrong".
        reason: Why it isn't divided, why it can't run, or what is wrong.
    """

    outcome: str
    reason: str = ""


class Net(nn.Module):
    """Parameters of all dimensions, some of which aren't used in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(12, 6)
        self.conv = nn.Conv1d(2, 3, 3, padding=1)
        self.inner, self.norm = nn.Linear(9, 16), nn.LayerNorm(16)
        self.seldom, self.outer = nn.Linear(16, 16), nn.Linear(16, 4)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, index: torch.Tensor, *, uses_all: bool) -> torch.Tensor:
        x = self.conv(self.rows(index).view(-1, 2, 3)).flatten(1)
        x = torch.tanh(self.norm(self.inner(x)))
        if uses_all:
            x = x + torch.tanh(self.seldom(x))
        return self.outer(x) * self.scale


def classes_of(package: str) -> dict[str, type[Optimizer]]:
    """Return the optimizers among the public names of a package."""
    if package == "timm":
        stand_in_for_torchvision()
    module = importlib.import_module(MODULES[package])
    found: dict[str, type[Optimizer]] = {}
    for name, kind in vars(module).items():
        is_kind = inspect.isclass(kind) and issubclass(kind, Optimizer) and kind is not Optimizer
        is_of_package = is_kind and kind.__module__.startswith("torch.") == (package == "torch")
        if is_of_package and not name.startswith("_"):
            found.setdefault(kind.__name__, kind)
    return found


def endings_of(package: str, only: str = "") -> dict[str, list[Ending]]:
    """Return how training with each optimizer of ``package`` ends.

    By default and, if it is divided then, with other options. Every rank calls it.

    Args:
        package: One of ``MODULES``.
        only: A pattern of names of classes.
    """
    lockstep.init()
    torch.compiler.set_stance("force_eager")
    warnings.simplefilter("ignore")
    return {
        name: [*_endings(kind)]
        for name, kind in classes_of(package).items()
        if re.fullmatch(only or ".*", name)
    }


def _endings(kind: type[Optimizer]) -> Iterator[Ending]:
    ending = _ending(kind, _WAYS)
    yield ending
    if ending.outcome == "divided":
        yield _ending(kind, _WITH_OPTIONS)


class _Way(NamedTuple):
    """How an optimizer is made of a network, and what its step needs."""

    make: Callable[[Any, Net], Any]
    has_closure: bool = False
    has_graph: bool = False


def _in_groups(kind: Any, net: Net) -> Any:
    """Make it with some options, and two groups if it has weight decay."""
    known = inspect.signature(kind).parameters
    options = {name: value for name, value in _OPTIONS.items() if name in known}
    if "weight_decay" not in known:
        return kind(net.parameters(), **options)
    return kind(
        [{"params": _others(net)}, {"params": _matrices(net), "weight_decay": 0.1}], **options
    )


def _with_muon(kind: Any, net: Net) -> Any:
    groups = (net.inner.weight, net.outer.weight), (net.rows.weight, net.norm.weight, net.scale)
    return kind([{"params": members, "use_muon": i == 0} for i, members in enumerate(groups)])


def _split(kind: Any, net: Net) -> Any:
    groups = _others(net), _matrices(net)
    inner = importlib.import_module("heavyball").AdamW
    return kind([{"params": members, "optimizer": inner} for members in groups])


def _plain_matrices(net: Net) -> list[nn.Parameter]:
    return [p for p in net.parameters() if p.ndim == 2]


def _matrices(net: Net) -> list[nn.Parameter]:
    return [p for p in net.parameters() if p.ndim > 1]


def _others(net: Net) -> list[nn.Parameter]:
    return [p for p in net.parameters() if p.ndim < 2]


# The first way in which one process trains is taken.
_WAYS = [
    _Way(lambda kind, net: kind(net.parameters())),
    _Way(lambda kind, net: kind(net.parameters()), has_closure=True),
    _Way(lambda kind, net: kind(net.parameters()), has_graph=True),
    _Way(lambda kind, net: kind(net.parameters(), lr=1e-2)),
    _Way(lambda kind, net: kind([*net.named_parameters()], lr=1e-2)),
    _Way(lambda kind, net: kind(_plain_matrices(net), lr=1e-2)),
    _Way(lambda kind, net: kind(net, lr=1e-2)),
    _Way(lambda kind, net: kind(_plain_matrices(net)), has_closure=True),
    _Way(lambda kind, net: kind(torch.optim.AdamW(net.parameters()))),
    _Way(lambda kind, net: kind(net.parameters(), torch.optim.AdamW), has_closure=True),
    _Way(lambda kind, net: kind(net, net.parameters(), torch.optim.AdamW), has_closure=True),
    _Way(lambda kind, net: kind(net.parameters(), num_iterations=100)),
    _Way(lambda kind, net: kind(net.parameters(), num_data=100), has_closure=True),
    _Way(lambda kind, net: kind(torch.optim.AdamW(_matrices(net)))),
    _Way(_with_muon),
    _Way(_split),
]
_WITH_OPTIONS = [
    _Way(_in_groups),
    _Way(_in_groups, has_closure=True),
    _Way(_in_groups, has_graph=True),
]
# Beside the defaults: what is an option of many.
_OPTIONS = {"weight_decay": 0.1, "foreach": False, "fused": False, "weight_decouple": False}
# What the optimizers of a package note and don't need: in a group the number of its elements, and
# in the state of the first parameter the step, which the group has too.
_NOTED = {"heavyball": {"param_count", "step"}}


class _Result(NamedTuple):
    parameters: list[list[torch.Tensor]]
    state_dict: dict[str, Any]


def _ending(kind: type[Optimizer], ways: Sequence[_Way]) -> Ending:
    errors = []
    for way in ways:
        try:
            net = _net()
            _seed(0)
            alone = _train(net, way.make(kind, net), way, is_alone=True)
            break
        except Exception as error:
            errors.append(_told(error))
    else:
        return Ending("not run", errors[0])
    try:
        return _sharded(kind, way, alone)
    except Exception as error:
        return Ending("wrong", "".join(traceback.format_exception(error))[-1500:])


def _sharded(kind: type[Optimizer], way: _Way, alone: _Result) -> Ending:
    rank, _ = place()
    # Of its own, as a rank that fails leaves the other one waiting in its group.
    net = lockstep.parallelize(_net(), process_group=dist.new_group())
    _seed(0)
    optimizer = way.make(kind, net)
    _seed(rank)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            lockstep.shard_optimizer(optimizer)
        told = [found[1] for each in caught if (found := _TOLD.search(str(each.message)))]
        found = _train(net, optimizer, way, is_alone=False)
    except ModelError as error:
        return Ending("refused", str(error))
    outcome = "undivided" if lockstep.optim.undivided.is_undivided(optimizer) else "divided"
    if len(told) != (outcome == "undivided" and rank == 0):
        return Ending("wrong", f"{outcome}, and {len(told)} warnings {told}")
    if not all(value.isfinite().all() for value in alone.parameters[-1]):
        return Ending("wrong", "it diverges, so that nothing is compared")
    noted = _NOTED.get(kind.__module__.partition(".")[0], set())
    if different := _difference(alone, found, noted):
        return Ending("wrong", f"{outcome} {told}, and {different}")
    return Ending(outcome, *told)


def _net() -> Net:
    _seed(0)
    return Net()


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def _train(net: Net, optimizer: Any, way: _Way, *, is_alone: bool) -> _Result:
    with redirect_stdout(io.StringIO()):
        found, changes = [], hasattr(optimizer, "train") and hasattr(optimizer, "eval")
        if changes:
            try:
                optimizer.train()
            except AttributeError:  # of a wrapper, around an optimizer that hasn't these methods
                changes = False
        for step in range(_NUM_STEPS):
            _step(net, optimizer, way, step, is_alone=is_alone)
            if changes and step % 10 == 9:
                optimizer.eval()
                found.append(_values(net))
                optimizer.train()
            if step % 4 == 0:
                found.append(_values(net))
        return _Result([*found, _values(net)], optimizer.state_dict())


def _values(net: Net) -> list[torch.Tensor]:
    return [p.detach().clone() for p in net.parameters()]


def _step(net: Net, optimizer: Any, way: _Way, step: int, *, is_alone: bool) -> None:
    rank, size = place()
    # A mean over ranks that is the gradient of one, in every bit: the others' are zero.
    weight = 1.0 if is_alone else size * float(rank == step % size)
    generator = torch.Generator().manual_seed(step)
    index = torch.randint(12, (8,), generator=generator)
    target = torch.randint(4, (8,), generator=generator)

    @torch.enable_grad()  # which not all do that call it
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(index, uses_all=step % 3 != 1), target)
        loss = loss * _SCALES[step % len(_SCALES)]
        (loss * weight).backward(create_graph=way.has_graph)
        return loss

    if way.has_closure:
        optimizer.step(closure)
    else:
        closure()
        optimizer.step()


def _difference(alone: _Result, found: _Result, noted: Set[str]) -> str:
    for index, (mine, theirs) in enumerate(zip(alone.parameters, found.parameters, strict=True)):
        for number, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            if not _have_same_bits(a, b):
                largest = float((a - b).abs().max() / a.abs().max())
                return f"parameter {number} differs by {largest:.1e} at check {index}"
    dicts = alone.state_dict, found.state_dict
    return next(_differences_of(*dicts, noted, "state dict"), "")


def _have_same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.shape == b.shape and a.dtype == b.dtype and bool(((a == b) | ((a != a) & (b != b))).all())
    )


def _differences_of(a: Any, b: Any, noted: Set[str], place: str) -> Iterator[str]:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if not _have_same_bits(a, b):
            yield f"{place} is {a.flatten()[:3]} and {b.flatten()[:3]}"
    elif isinstance(a, dict) and isinstance(b, dict):
        if (a.keys() ^ b.keys()) - noted:
            yield f"{place} has {[*a]} and {[*b]}"
        for key in (a.keys() & b.keys()) - noted:
            yield from _differences_of(a[key], b[key], noted, f"{place}[{key!r}]")
    elif isinstance(a, list | tuple) and isinstance(b, list | tuple):
        if len(a) != len(b):
            yield f"{place} has {len(a)} and {len(b)}"
        for index, (x, y) in enumerate(zip(a, b, strict=False)):
            yield from _differences_of(x, y, noted, f"{place}[{index}]")
    elif isinstance(a, float) and isinstance(b, float):
        if not _have_same_bits(*(torch.tensor(each, dtype=torch.float64) for each in (a, b))):
            yield f"{place} is {a!r} and {b!r}"
    elif isinstance(a, str | int | float | None) and (type(a) is not type(b) or a != b):
        yield f"{place} is {a!r} and {b!r}"


def _told(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:120]}"
