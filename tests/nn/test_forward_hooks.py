"""How often a hook is called before forwards, which takes time in each."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as hooks

import lockstep
import lockstep.nn.forward_hooks
from lockstep.errors import ModelError

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


def copied(model: nn.Module) -> None:
    copy = pickle.loads(pickle.dumps(model))
    torch.testing.assert_close(copy(X), model[1](X @ model[0].weight.T + model[0].bias))


def traced(model: nn.Module) -> None:
    torch.jit.trace(model, X)


def exported(model: nn.Module) -> None:
    torch.export.export(model, (X,))


def scripted(model: nn.Module) -> None:
    torch.testing.assert_close(
        torch.jit.script(model)(X), model[1](X @ model[0].weight.T + model[0].bias)
    )


def not_scripted(model: nn.Module) -> None:
    """Not with hooks of its own, and its unpickled copy once that has been called."""
    with pytest.raises(ModelError, match=r"torch\.jit\.script\(\) can't compile .* Call it once"):
        torch.jit.script(model)
    copy = pickle.loads(pickle.dumps(model))
    copy(X)
    torch.jit.script(copy)


def export_while_it_waits(world: lockstep.World) -> list[float]:
    model = lockstep.parallelize(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    other = layers()
    for has_hooks in (False, True):
        step(model)
        for make in (copied, traced, exported, not_scripted if has_hooks else scripted):
            model[0].weight = nn.Parameter(torch.full((3, 3), 1.0 + world.rank))
            if has_hooks:  # of its own, as another model's backward ends
                step(other)
            make(model)
    step(model)
    scripted(model)
    return model[0].weight[0].tolist()


@pytest.mark.filterwarnings("ignore:.torch.jit", "ignore::torch.jit.TracerWarning")
def test_a_model_that_waits_is_exported_traced_scripted_and_pickled() -> None:
    """It has a parameter that the others don't know yet, and takes rank 0's in a real forward."""
    assert lockstep.launch(export_while_it_waits, 2) == [[1.0] * 3] * 2


UNPICKLED = """
import pickle, sys
import torch
from torch import nn
model = pickle.load(open(sys.argv[1], "rb"))
x = torch.ones(2, 3)
for _ in range(2):
    model(x).sum().backward()
assert not any(module._forward_pre_hooks for module in model.modules())
assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
assert torch.equal(model[1].bias.grad, torch.full((3,), 4.0))
assert torch.equal(model[0].weight, torch.full((3, 3), 1.0 + int(sys.argv[2])))
"""


def pickle_while_it_waits(world: lockstep.World, folder: str, has_hooks: bool) -> list[float]:
    """The gradient of an unpickled model that is made parallel, beside the one that waits."""
    model = lockstep.parallelize(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    step(model)
    model.zero_grad()
    model[0].weight = nn.Parameter(torch.full((3, 3), 1.0 + world.rank))
    if has_hooks:
        step(layers())
    path = f"{folder}/{world.rank}"
    with open(path, "wb") as file:
        pickle.dump(model, file)
    command = [sys.executable, "-c", UNPICKLED, path, str(world.rank)]
    subprocess.run(command, check=True)
    with open(path, "rb") as file:
        copy = lockstep.parallelize(pickle.load(file))
    (copy(X) * (1 + world.rank)).sum().backward()
    step(model)
    assert model[0].weight.tolist() == copy[0].weight.tolist() == [[1.0] * 3] * 3
    return copy[1].bias.grad.tolist()


@pytest.mark.parametrize("has_hooks", [False, True])
def test_an_unpickled_model_is_plain_and_may_be_parallel_anew(
    tmp_path: Path, has_hooks: bool
) -> None:
    arguments = str(tmp_path), has_hooks
    assert lockstep.launch(pickle_while_it_waits, 2, arguments) == [[3.0] * 3] * 2
