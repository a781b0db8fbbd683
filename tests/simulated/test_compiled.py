"""Compiled code beside models on accelerators: no hook on forwards, of which it would warn."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

import lockstep
from tests.simulated.control import KIND, set_delay

pytestmark = pytest.mark.forks


def small_net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager", fullgraph=True)


def compiled_last(model: nn.Module, world: lockstep.World) -> nn.Module:
    return compiled(lockstep.parallelize(model.to(world.device)))


def compiled_first(model: nn.Module, world: lockstep.World) -> nn.Module:
    return lockstep.parallelize(compiled(model.to(world.device)))


def moved_last(model: nn.Module, world: lockstep.World) -> nn.Module:
    return compiled(lockstep.parallelize(model)).to(world.device)


def moved_by_hand(model: nn.Module, world: lockstep.World) -> nn.Module:
    lockstep.parallelize(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(world.device)
    return compiled(model)


def changed_last(model: nn.Module, world: lockstep.World) -> nn.Module:
    """Each rank has other values of its own, in place of which come rank 0's."""
    torch.manual_seed(7 + world.rank)
    trained = compiled_last(model, world)
    model[2] = nn.Linear(4, 2).to(world.device)
    return trained


def trained(world: lockstep.World, wrap: Callable) -> list[torch.Tensor]:
    set_delay("0,5")  # a refresh compares models by messages between hosts
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        beside = compiled(nn.Linear(4, 4).to(world.device))
        model = wrap(small_net(), world)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            x = torch.full((2, 4), 1.0 + world.rank, device=world.device)
            optimizer.zero_grad()
            beside(x)
            model(x).square().mean().backward()
            optimizer.step()
    return [parameter.detach().cpu() for parameter in model.parameters()]


def trained_by_one() -> list[torch.Tensor]:
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.tensor([[1.0], [1.0], [2.0], [2.0]]).expand(4, 4)).square().mean().backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("wrap", [compiled_last, compiled_first, moved_last, moved_by_hand])
def test_compiled_models_train_as_one_process_and_warn_of_nothing(wrap: Callable) -> None:
    if wrap is moved_by_hand and KIND != "cuda":
        pytest.skip("data can't move to a device that torch doesn't know")
    for parameters in lockstep.launch(trained, 2, (wrap,)):
        torch.testing.assert_close(parameters, trained_by_one(), rtol=1e-6, atol=1e-6)


def test_a_compiled_model_that_has_changed_begins_with_the_values_of_rank_0() -> None:
    first, second = lockstep.launch(trained, 2, (changed_last,))
    assert all(map(torch.equal, first, second))
