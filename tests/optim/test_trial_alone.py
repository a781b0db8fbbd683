"""One rank alone tries an optimizer: so no rank may wait for it, whatever a step does."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import all_gather as gather_everywhere

import lockstep
from lockstep.optim.probe import Treatment, probe
from tests.nn.models import Digits
from tests.optim.optimizers import Plain

NOTES: list[int] = []
MANY: list[Any] = [[number] for number in range(10_000)]


def gather_in_a_function() -> None:
    gather_everywhere([torch.zeros(1) for _ in range(dist.get_world_size())], torch.ones(1))


class Averaging(Plain):
    def step(self, closure: Any = None) -> None:
        dist.all_reduce(torch.ones(1))
        super().step()


class Gathering(Plain):
    def step(self, closure: Any = None) -> None:
        gather_in_a_function()
        super().step()


class Forgiving(Plain):
    def step(self, closure: Any = None) -> None:
        with contextlib.suppress(RuntimeError):
            dist.barrier()
        super().step()


@pytest.mark.parametrize(
    ("kind", "name"), [(Averaging, "all_reduce"), (Gathering, "all_gather"), (Forgiving, "barrier")]
)
def test_collectives_of_a_step_are_told_and_not_entered(kind: Any, name: str) -> None:
    def body(world: lockstep.World) -> list[Any]:
        torch.manual_seed(0)
        model = lockstep.parallelize(nn.Linear(4, 2))
        optimizer = lockstep.shard_optimizer(kind(model.parameters()))
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        return [p.tolist() for p in model.parameters()]

    with pytest.warns(UserWarning, match=rf"its steps call {name}\(\)"):
        first, second = lockstep.launch(body, 2, ranks="threads")
    assert first == second


class Cyclic(Plain):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.tree: dict[str, Any] = {"children": []}
        self.tree["children"].append(self.tree)
        self.form = torch.empty(3, device="meta")


class Noting(Plain):
    def step(self, closure: Any = None) -> None:
        NOTES.append(len(MANY))
        super().step()


def of_an_empty_cell() -> type[Plain]:
    if NOTES is None:
        late = 1

    class Late(Plain):
        def step(self, closure: Any = None) -> None:
            if closure is not None:
                print(late)
            super().step()

    return Late


@pytest.mark.parametrize("kind", [Cyclic, of_an_empty_cell()])
def test_what_cannot_be_compared_is_no_reason(kind: Any) -> None:
    assert probe(kind(Digits().parameters())).treatment is Treatment.DIVIDE


def test_what_the_program_has_noted_stays() -> None:
    first = MANY[0]
    NOTES[:] = [7]
    probe(Noting(Digits().parameters()))
    assert NOTES == [7]
    assert MANY[0] is first


def test_an_error_of_a_trial_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RecursionError("too deep")

    monkeypatch.setattr("lockstep.optim.probe._Trial.run", fails)
    found = probe(Plain(Digits().parameters()))
    assert found.treatment is Treatment.UNDIVIDED
    assert found.reason == "it can't be tried (RecursionError: too deep)"


class Helped(Plain):
    def one(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        self.state[parameter].setdefault("steps", 0)
        parameter.data.add_(parameter.grad, alpha=-group["lr"])

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.one(parameter, group)


class OfHelped(Helped):
    def step(self, closure: Any = None) -> None:
        super().step()


def test_helpers_of_a_base_class_are_not_called_alone() -> None:
    assert probe(OfHelped(Digits().parameters())).treatment is Treatment.DIVIDE
