"""What is loaded is what was saved, in every bit, at any number of ranks."""

from __future__ import annotations

import copy
import math
from collections import Counter, OrderedDict, deque
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import Optimizer

import lockstep
from tests.checkpoint.training import batches, same, states_of, trained
from tests.counts import a_third, num_examples
from tests.nn.models import Digits, Layers, Shared
from tests.optim.optimizers import OPTIMIZERS
from tests.ranks import run_ranks
from tests.training import train

DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn),
    *(torch.complex64, torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
]


def queues(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[deque[Any]]:
    sizes = st.none() | st.integers(0, 3)
    return st.builds(deque, st.lists(inner, max_size=3), maxlen=sizes)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    dtype, seed = draw(st.sampled_from(DTYPES)), draw(st.integers(0, 99))
    generator = torch.Generator().manual_seed(seed)
    numel = math.prod(shape) * dtype.itemsize
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (numel,), generator=generator)
    tensor = raw.to(torch.uint8).view(dtype).view(shape)
    if draw(st.booleans()) and tensor.dim() > 1:
        tensor = tensor.transpose(0, -1)
    if draw(st.booleans()) and tensor.dim() and tensor.shape[0]:
        tensor = tensor[::2]
    return tensor.conj() if dtype is torch.complex64 and draw(st.booleans()) else tensor


KEYS = st.one_of(st.text(max_size=4), st.integers(), st.tuples(st.integers(), st.text(max_size=2)))
LEAVES = st.one_of(
    *(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=9)),
    *(st.binary(max_size=9), st.complex_numbers(allow_nan=False), tensors()),
    st.sampled_from([torch.Size([2, 3]), torch.bfloat16, torch.device("cpu"), Counter("abba")]),
    st.sampled_from([np.arange(6.0).reshape(2, 3).T, np.int32(7), {1, 2}, frozenset("ab")]),
)
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        *(st.lists(inner, max_size=3), st.lists(inner, max_size=3).map(tuple)),
        *(queues(inner), st.dictionaries(KEYS, inner, max_size=3)),
        st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict),
    ),
    max_leaves=12,
)


@settings(max_examples=num_examples(300, 60))
@given(TREES)
def test_any_value_is_loaded_as_it_was_saved(tmp_path_factory, value) -> None:
    folder = tmp_path_factory.mktemp("trees")
    lockstep.save(folder, value=value)
    found = lockstep.load(folder, value=None)["value"]
    assert same(found, value), (found, value)


def test_tied_tensors_are_saved_once_and_stay_tied(tmp_path) -> None:
    tensor = torch.randn(20_000)
    path = lockstep.save(tmp_path, values=[tensor, tensor, tensor[1:]])
    assert sum(file.stat().st_size for file in path.glob("*.bin")) < 2.5 * tensor.nbytes
    first, second, third = lockstep.load(tmp_path, values=None)["values"]
    assert first is second
    assert torch.equal(third, tensor[1:])


def check_from_to(
    folder: Path, first: int, second: int, make: Any, is_sharded: tuple[bool, bool], kind: Any
) -> None:
    """Save at ``first`` ranks and load at ``second``; compare with the state dicts."""

    def saved(rank: int, group: dist.ProcessGroup) -> Any:
        model, optimizer = trained(group, kind, make, sharded=is_sharded[0])
        lockstep.save(folder, process_group=group, model=model, optimizer=optimizer, epoch=7)
        return copy.deepcopy(states_of(model, optimizer))

    def loaded(rank: int, group: dist.ProcessGroup) -> None:
        like, its = trained(group, kind, make, sharded=is_sharded[1], steps=1)
        like.load_state_dict(expected[0])
        its.load_state_dict(copy.deepcopy(expected[1]))
        model, optimizer = trained(group, kind, make, sharded=is_sharded[1], steps=1)
        found = lockstep.load(
            folder, process_group=group, model=model, optimizer=optimizer, epoch=0
        )
        assert found == {"epoch": 7}
        assert same(states_of(model, optimizer), expected)
        train(like, its, batches(like, range(3, 5)))
        train(model, optimizer, batches(model, range(3, 5)))
        assert same(states_of(model, optimizer), states_of(like, its))

    expected = run_ranks(first, saved)[0]
    run_ranks(second, loaded)


SIZES = [(1, 2), (2, 1), (2, 2), (3, 4), (4, 3)]
KINDS = [(False, False), (True, True), (True, False), (False, True)]


@a_third("first, second, is_sharded", [(*sizes, kinds) for kinds in KINDS for sizes in SIZES])
def test_state_is_loaded_at_any_number_of_ranks(tmp_path, first, second, is_sharded) -> None:
    check_from_to(tmp_path, first, second, OPTIMIZERS["AdamW"], is_sharded, Digits)


@a_third("name, kind", [(name, kind) for name in OPTIMIZERS for kind in (Layers, Shared)], 1)
def test_state_of_any_optimizer_is_loaded(tmp_path, name, kind) -> None:
    check_from_to(tmp_path, 3, 2, OPTIMIZERS[name], (True, True), kind)


class Lookahead(Optimizer):
    """Around another optimizer, with weights of its own, as several libraries have it."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        super().__init__(optimizer.param_groups, {})
        self.param_groups = optimizer.param_groups
        self.slow = [p.detach().clone() for g in self.param_groups for p in g["params"]]

    def step(self, closure: Any = None) -> None:
        self.optimizer.step()
        for slow, p in zip(self.slow, self.param_groups[0]["params"], strict=True):
            slow.lerp_(p.detach(), 0.5)

    def state_dict(self) -> dict[str, Any]:
        return {"slow": self.slow, "inner": self.optimizer.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.slow = state_dict["slow"]
        self.optimizer.load_state_dict(state_dict["inner"])


def test_an_optimizer_around_another_one_is_saved_with_its_own_state(tmp_path: Path) -> None:
    def make() -> tuple[nn.Module, Lookahead]:
        model = nn.Linear(3, 2)
        return model, Lookahead(torch.optim.Adam(model.parameters(), 0.1))

    def step(model: nn.Module, optimizer: Optimizer) -> None:
        model(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = make()
    step(model, optimizer)
    lockstep.save(tmp_path, model=model, optimizer=optimizer)
    again, other = make()
    lockstep.load(tmp_path, model=again, optimizer=other)
    for each in (model, optimizer), (again, other):
        step(*each)
    assert same(other.state_dict(), optimizer.state_dict())
    assert same([*again.parameters()], [*model.parameters()])


def test_plain_values_are_returned_unasked(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    lockstep.save(tmp_path, model=model, epoch=3, best={"loss": 0.5})
    assert lockstep.load(tmp_path, model=model) == {"epoch": 3, "best": {"loss": 0.5}}
    assert lockstep.load(tmp_path, epoch=0) == {"epoch": 3, "best": {"loss": 0.5}}
