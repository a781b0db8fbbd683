"""Optimizers that aren't element-wise hold the parameters themselves, each on one rank."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

import lockstep
from lockstep.errors import CollectiveFailed, ModelError
from tests.counts import in_turn
from tests.nn.models import Digits, Unused
from tests.optim.optimizers import KINDS, Plain, ScheduleFree
from tests.optim.programs import adamw, check_same_bits, losses, take_steps
from tests.ranks import run_ranks


def run(kind: Callable[[Any], Optimizer]) -> Any:
    def program(model: nn.Module, shard: Any, rank: int) -> None:
        for number, parameter in enumerate(model.parameters()):
            parameter.lr_scale = 1 / (1 + number)
        next(model.parameters()).requires_grad_(False)
        take_steps(model, shard(kind(model.parameters())), rank)

    return program


@in_turn("kind, backend", KINDS, ["threads", "shm", "gloo"])
def test_what_reads_the_parameters_themselves_has_the_same_bits(kind: Any, backend: str) -> None:
    check_same_bits(run(kind), Unused, backend=backend)


def test_state_is_by_parameter_on_its_owner_and_raises_elsewhere() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> list[str]:
        model = lockstep.parallelize(Digits(), process_group=group)
        optimizer = lockstep.shard_optimizer(torch.optim.Adafactor(model.parameters()))
        take_steps(model, optimizer, rank)
        whole = optimizer.state_dict()["state"]
        found = []
        for index, (name, parameter) in enumerate(model.named_parameters()):
            if any(key is parameter for key in optimizer.state):
                entry = optimizer.state[parameter]
                torch.testing.assert_close(entry, whole[index], rtol=0, atol=0)
                assert optimizer.state.get(parameter) is entry
                found.append(name)
                continue
            told = f"state of {name!r} .* is on rank {1 - rank}"
            for look in dict.__getitem__, dict.get, dict.__contains__, dict.pop:
                with pytest.raises(ModelError, match=told):
                    getattr(optimizer.state, look.__name__)(parameter)
            with pytest.raises(ModelError, match=told):
                optimizer.state.setdefault(parameter, {})
        return found

    first, second = run_ranks(2, body)
    assert first
    assert second
    assert sorted(first + second) == sorted(name for name, _ in Digits().named_parameters())


def putting_state(model: nn.Module, shard: Any, rank: int) -> None:
    optimizer = shard(adamw(model.parameters()))
    take_steps(model, optimizer, rank)
    saved = copy.deepcopy(optimizer.state_dict()["state"])
    parameters = [*model.parameters()]
    for index in 1, 3:
        for key in "exp_avg", "exp_avg_sq":
            saved[index][key] *= 4
        optimizer.state[parameters[index]] = saved[index]
    del optimizer.state[parameters[2]]
    take_steps(model, optimizer, rank)


def densifying(model: nn.Module, shard: Any, rank: int) -> None:
    """Replace a bias by a copy in the midst of training, with changed state."""
    optimizer = shard(adamw(model.parameters()))
    take_steps(model, optimizer, rank)
    last = len([*model.parameters()]) - 1
    state = copy.deepcopy(optimizer.state_dict()["state"][last])
    optimizer.state.pop(model.fc2.bias, None)
    model.fc2.bias = nn.Parameter(model.fc2.bias.detach() * 2)
    optimizer.param_groups[0]["params"][last] = model.fc2.bias
    optimizer.state[model.fc2.bias] = state | {"exp_avg": state["exp_avg"] * 8}
    take_steps(model, optimizer, rank)


@pytest.mark.parametrize("program", [putting_state, densifying])
def test_what_a_program_puts_into_the_state_counts(program: Any) -> None:
    check_same_bits(program)


def forgetting(model: nn.Module, shard: Any, rank: int) -> None:
    optimizer = shard(adamw(model.parameters()))
    take_steps(model, optimizer, rank)
    optimizer.state = defaultdict(dict)
    take_steps(model, optimizer, rank)
    optimizer.state.clear()
    take_steps(model, optimizer, rank)


def test_state_may_be_forgotten() -> None:
    check_same_bits(forgetting)


def evaluating(model: nn.Module, shard: Any, rank: int) -> list[Any]:
    optimizer = shard(ScheduleFree(model.parameters()))
    found = []
    for _ in range(2):
        take_steps(model, optimizer, rank)
        optimizer.eval()
        found.append([p.tolist() for p in model.parameters()])
        optimizer.train()
    return found


@pytest.mark.parametrize("backend", ["threads", "shm", "gloo"])
def test_methods_that_use_the_state_act_on_all_parameters(backend: str) -> None:
    check_same_bits(evaluating, backend=backend)


def test_a_method_that_returns_a_part_is_refused() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = lockstep.parallelize(Digits(), process_group=group)
        optimizer = lockstep.shard_optimizer(ScheduleFree(model.parameters()))
        take_steps(model, optimizer, rank)
        with pytest.raises(ModelError, match=r"num_averaged\(\) .* returns a int"):
            optimizer.num_averaged()

    run_ranks(2, body)


def test_a_method_that_one_rank_alone_calls_ends_with_an_error() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = lockstep.parallelize(Digits(), process_group=group)
        optimizer = lockstep.shard_optimizer(ScheduleFree(model.parameters()))
        take_steps(model, optimizer, rank)
        if rank == 0:
            with pytest.raises(CollectiveFailed, match="Rank 1"):
                optimizer.eval()

    run_ranks(2, body)


def test_a_method_in_join_is_refused() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = lockstep.parallelize(Digits(), process_group=group)
        optimizer = lockstep.shard_optimizer(ScheduleFree(model.parameters()))
        with lockstep.join(model):
            for loss in losses(model, rank, 1):
                loss.backward()
            optimizer.step()
            with pytest.raises(ModelError, match=r"eval\(\) .* outside of join\(\)"):
                optimizer.eval()

    run_ranks(2, body)


def test_an_error_in_a_step_gives_parameters_their_data_back() -> None:
    class Failing(Plain):
        fails = False

        def update(self, parameter: nn.Parameter, lr: float) -> None:
            if self.fails:
                raise ArithmeticError
            super().update(parameter, lr)

    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = lockstep.parallelize(Digits(), process_group=group)
        optimizer = lockstep.shard_optimizer(Failing(model.parameters()))
        optimizer.fails = True
        before = [p.data_ptr() for p in model.parameters()]
        next(losses(model, rank, 1)).backward()
        with pytest.raises(ArithmeticError):
            optimizer.step()
        assert [p.data_ptr() for p in model.parameters()] == before

    run_ranks(2, body, backend="shm")
