"""How often a hook is called before forwards, which takes time in each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as hooks

import lockstep
import lockstep.nn.forward_hooks

# Processes, as threads share the hook.
pytestmark = pytest.mark.forks

X = torch.ones(2, 3)
CALLED: list[nn.Module] = []


def note_calls() -> None:
    """Note with which modules it is called in this process."""
    before_forward: Any = lockstep.nn.forward_hooks.before_forward

    def note(module: nn.Module, inputs: object) -> None:
        CALLED.append(module)
        before_forward(module, inputs)

    lockstep.nn.forward_hooks.before_forward = note


def layers() -> nn.Module:
    torch.manual_seed(1)
    return lockstep.parallelize(nn.Sequential(*[nn.Linear(3, 3) for _ in range(20)]))


def step(model: nn.Module) -> None:
    model(X).sum().backward()


def num_calls_in_steps(model: nn.Module) -> int:
    for _ in range(2):
        step(model)
    CALLED.clear()
    for _ in range(3):
        step(model)
    return len(CALLED)


def beside_one_that_is_not_used(world: lockstep.World) -> int:
    note_calls()
    old, new = layers(), layers()
    step(old)
    return num_calls_in_steps(new)


def beside_one_that_has_changed(world: lockstep.World) -> int:
    note_calls()
    old, new = layers(), layers()
    torch.manual_seed(1 + world.rank)
    old[3] = nn.Linear(3, 3)
    found = num_calls_in_steps(new)
    old[2:5](X).sum().backward()  # it has rank 0's values, as before any other forward
    assert not lockstep.any(old[3].bias[0].item() != lockstep.broadcast(old[3].bias[0].item()))
    assert not any(module._forward_pre_hooks for module in old.modules())
    return found


@pytest.mark.parametrize("body", [beside_one_that_is_not_used, beside_one_that_has_changed])
def test_a_model_that_is_not_used_takes_no_time_in_forwards_of_others(body: Callable) -> None:
    assert lockstep.launch(body, 2) == [3, 3]


def evaluate(world: lockstep.World) -> int:
    note_calls()
    scripted = torch.jit.trace(nn.Linear(3, 3), X)
    model = layers()
    step(model)
    CALLED.clear()
    with torch.no_grad():
        for _ in range(3):
            model(X)
            assert hooks._global_forward_pre_hooks
        with pytest.raises(RuntimeError, match="shapes"):
            model(torch.ones(2, 4))
    assert hooks._global_forward_pre_hooks
    assert not model._forward_hooks
    found = len(CALLED)
    with torch.no_grad():
        scripted(X)
    assert CALLED.pop() is scripted
    step(model)
    assert len(CALLED) == found + 1
    return found


def test_a_forward_of_an_evaluation_calls_the_hook_once() -> None:
    assert lockstep.launch(evaluate, 2) == [4, 4]
