"""Parameters of little precision, updated in float32 values that the ranks share out."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

import lockstep
from tests.nn.models import Digits
from tests.ranks import run_ranks

KINDS: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.003, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-4),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-3),
}
Group = dist.ProcessGroup | None


def backward(model: nn.Module, group: Group, step: int) -> None:
    rank = 0 if group is None else group.rank()
    x = torch.randn(4, *Digits.sample, generator=torch.Generator().manual_seed(10 * step + rank))
    model(x.bfloat16()).square().mean().backward()


class ByHand:
    """An unsharded optimizer over float32 copies of a model's parameters."""

    def __init__(self, model: nn.Module, make: Callable[[Any], Optimizer]) -> None:
        self.parameters = [*model.parameters()]
        self.masters = [parameter.detach().float() for parameter in self.parameters]
        self.optimizer = make(self.masters)

    def step(self) -> None:
        with torch.no_grad():
            for parameter, master in zip(self.parameters, self.masters, strict=True):
                changed = master.bfloat16() != parameter
                master[changed] = parameter[changed].float()
                master.grad = None if parameter.grad is None else parameter.grad.float()
            self.optimizer.step()
            for parameter, master in zip(self.parameters, self.masters, strict=True):
                parameter.copy_(master)
                parameter.grad = None


def first_model() -> nn.Module:
    torch.manual_seed(0)
    return Digits().bfloat16()


def sharded(first: nn.Module, kind: str, group: Group) -> tuple[nn.Module, Optimizer]:
    model = lockstep.parallelize(copy.deepcopy(first), process_group=group)
    optimizer = KINDS[kind](model.parameters())
    return model, lockstep.shard_optimizer(optimizer, master_dtype=torch.float32)


def check_against_hand(first: nn.Module, kind: str, group: Group) -> None:
    plain = lockstep.parallelize(copy.deepcopy(first), process_group=group)
    by_hand = ByHand(plain, KINDS[kind])
    model, optimizer = sharded(first, kind, group)
    for step in range(6):
        backward(plain, group, step)
        backward(model, group, step)
        if step == 3:  # the program changes some elements
            for each in plain, model:
                with torch.no_grad():
                    each.conv2.weight[::2].mul_(0.5)
        if step == 4:  # one isn't updated, and has states of its own from now on
            plain.fc1.bias.grad = model.fc1.bias.grad = None
        by_hand.step()
        optimizer.step()
        optimizer.zero_grad()
        for a, b in zip(plain.parameters(), model.parameters(), strict=True):
            assert b.dtype is torch.bfloat16
            assert torch.equal(a, b)
    state = optimizer.state_dict()["state"]
    for index, master in enumerate(by_hand.masters):
        assert torch.equal(state[index]["master"], master)
        assert not torch.equal(master, master.bfloat16().float())  # it tells more
        entry = by_hand.optimizer.state[master]
        assert state[index].keys() == {*entry, "master"}
        assert all(torch.equal(state[index][name], entry[name]) for name in entry)


@pytest.mark.parametrize("backend", ["threads", "shm"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_updates_are_those_of_float32_values(kind: str, size: int, backend: str) -> None:
    first = first_model()
    run_ranks(size, lambda rank, group: check_against_hand(first, kind, group), backend=backend)


@pytest.mark.parametrize("kind", KINDS)
def test_a_process_alone_has_them_too(kind: str) -> None:
    check_against_hand(first_model(), kind, None)


@pytest.mark.parametrize("size", [1, 2])
def test_parameters_of_later_have_them_too(size: int) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = lockstep.parallelize(nn.Sequential(nn.Linear(2, 2)).bfloat16(), process_group=group)
        model.append(nn.Linear(2, 2).bfloat16())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        lockstep.shard_optimizer(optimizer, master_dtype=torch.float32)
        model(torch.ones(1, 2).bfloat16()).sum().backward()
        optimizer.step()
        state = optimizer.state_dict()["state"]
        assert [state[index]["master"].dtype for index in range(4)] == [torch.float32] * 4

    run_ranks(size, body)


@pytest.mark.parametrize("kind", KINDS)
def test_training_goes_on_from_a_state_dict_at_another_number_of_ranks(kind: str) -> None:
    first, saved, ends = first_model(), list[Any](), list[list[torch.Tensor]]()

    def body(rank: int, group: dist.ProcessGroup) -> None:
        model, optimizer = sharded(saved[0] if saved else first, kind, group)
        if saved:
            optimizer.load_state_dict(copy.deepcopy(saved[1]))
        for step in range(3, 6) if saved else range(6):
            backward_alike(model, step)
            optimizer.step()
            optimizer.zero_grad()
            if step == 2:
                state = optimizer.state_dict()
                if rank == 0:
                    before = copy.deepcopy(model), copy.deepcopy(state)
        if rank == 0:
            saved.extend(() if saved else before)
            ends.append([parameter.detach().clone() for parameter in model.parameters()])

    def backward_alike(model: nn.Module, step: int) -> None:
        x = torch.randn(4, *Digits.sample, generator=torch.Generator().manual_seed(step))
        model(x.bfloat16()).square().mean().backward()

    for size in 2, 4:
        run_ranks(size, body)
    torch.testing.assert_close(*ends, rtol=0, atol=0)


def test_parameters_that_are_fine_enough_are_updated_themselves() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = lockstep.parallelize(nn.Linear(3, 3).double(), process_group=group)
        optimizer = lockstep.shard_optimizer(
            torch.optim.Adam(model.parameters()), master_dtype=torch.float32
        )
        model(torch.ones(1, 3).double()).sum().backward()
        optimizer.step()
        state = optimizer.state_dict()
        optimizer.load_state_dict(state)
        assert state["state"][0].keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert optimizer.state_dict()["state"][0]["exp_avg"].dtype is torch.float64

    run_ranks(2, body)


@pytest.mark.parametrize("dtype", ["float32", torch.int64])
def test_what_is_no_dtype_is_refused(dtype: object) -> None:
    model = lockstep.parallelize(nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"master_dtype.*such as torch\.float32"):
        lockstep.shard_optimizer(torch.optim.Adam(model.parameters()), master_dtype=dtype)


def test_a_state_dict_is_loaded_on_one_rank_too() -> None:
    model, optimizer = sharded(first_model(), "AdamW", None)
    again, other = sharded(first_model(), "AdamW", None)
    backward(model, None, 0)
    optimizer.step()
    again.load_state_dict(model.state_dict())
    other.load_state_dict(optimizer.state_dict())
    for each, stepped in ((model, optimizer), (again, other)):
        stepped.zero_grad()
        backward(each, None, 1)
        stepped.step()
    assert all(map(torch.equal, model.parameters(), again.parameters()))
