"""In which module of a step values begin not to be finite."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lockstep
from lockstep.errors import ModelError
from tests.ranks import run_ranks


class _Bad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, where: str) -> torch.Tensor:
        ctx.where = where
        return x / 0 if where == "forward" else x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * (float("nan") if ctx.where == "backward" else 1), None


class Bad(nn.Module):
    """May go wrong."""

    where = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Bad.apply(x, self.where)


class Part(nn.Module):
    """A layer, before which and behind which it may go wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.bad, self.layer, self.where = Bad(), nn.Linear(4, 4), ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Bad.apply(torch.relu_(self.layer(self.bad(x))), self.where)


class Net(nn.Module):
    """Parts one after the other, and beside each other with one input."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.pair = nn.Linear(4, 4), nn.ModuleList([Part(), Part()])
        self.end = nn.Sequential(Part(), nn.ReLU(inplace=True), nn.Linear(4, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.start(x)
        return self.end(self.pair[0](x) + self.pair[1](x))


CASES = [
    ("pair.0", "forward", "in the forward of 'pair.0' (Part)"),
    ("pair.1", "forward", "in the forward of 'pair.1' (Part)"),
    ("pair.0", "backward", "in the backward of 'pair.0' (Part)"),
    ("pair.1", "backward", "in the backward of 'pair.1' (Part)"),
    ("pair.0.bad", "backward", "in the backward of 'pair.0.bad' (Bad)"),
    ("pair.1.bad", "backward", "in the backward of 'pair.1.bad' (Bad)"),
    ("end.0", "backward", "in the backward of 'end.0' (Part)"),
    ("end.0", "parameter", "in the parameters of 'end.0.layer' (Linear)"),
    ("", "loss", "behind 'the model' (Net), as in the loss"),
    ("", "input", "in the forward of 'start' (Linear), which was given values that aren't finite"),
]


def trained(group: dist.ProcessGroup | None, rank: int, name: str, where: str) -> Any:
    """Take a guarded step, in which something goes wrong on the last rank."""
    net, numbers = Net(), torch.Generator().manual_seed(0)
    for parameter in net.parameters():
        nn.init.uniform_(parameter, -0.5, 0.5, generator=numbers)
    model = lockstep.parallelize(net, process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    is_here = group is None or rank == group.size() - 1
    if is_here and where in ("forward", "backward"):
        model.get_submodule(name).where = where
    x = torch.randn(3, 4, generator=numbers)
    if is_here and where == "input":
        x[1, 2] = float("nan")

    def body() -> None:
        if is_here and where == "parameter":
            with torch.no_grad():
                model.end[0].layer.bias[2] = float("nan")
        loss = model(x).square().mean()
        (loss * float("nan") if is_here and where == "loss" else loss).backward()
        optimizer.step()

    before = [p.detach().clone() for p in model.parameters()]
    guard = lockstep.guard(model, optimizer, trace_nonfinite=True)
    step = guard.run(body)
    assert all(map(torch.equal, before, model.parameters()))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.pair.modules())
    assert not any(p._backward_hooks for p in model.pair.parameters())
    return step


@pytest.mark.parametrize(("name", "where", "origin"), CASES)
@pytest.mark.parametrize("size", [1, 2])
def test_the_module_is_named(size: int, name: str, where: str, origin: str) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        step = trained(group, rank, name, where)
        assert step.blame.kind == "nonfinite"
        assert step.blame.rank == size - 1
        assert step.blame.origin == origin
        assert str(step.blame).endswith(f"; they come from {origin}")
        assert (step.num_skipped, step.in_a_row) == (1, 1), "the repeat isn't another one"

    run_ranks(size, body, backend="threads")


def test_a_repeat_that_is_finite_is_said_to_be() -> None:
    model = lockstep.parallelize(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    calls: list[int] = []

    def body() -> None:
        calls.append(1)
        (model(torch.ones(1, 2)).sum() * (float("nan") if len(calls) == 1 else 1)).backward()
        optimizer.step()

    before = model.weight.detach().clone()
    step = lockstep.guard(model, optimizer, trace_nonfinite=True).run(body)
    assert step.skipped
    assert "with the same random numbers, was finite" in step.blame.origin
    assert torch.equal(model.weight, before)
    assert len(calls) == 2


def test_other_failures_are_not_repeated() -> None:
    model = lockstep.parallelize(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    calls: list[int] = []

    def body() -> None:
        calls.append(1)
        raise ArithmeticError("planted")

    step = lockstep.guard(model, optimizer, trace_nonfinite=True).run(body)
    assert (len(calls), step.blame.kind, step.blame.origin) == (1, "exception", "")


def test_a_with_can_not_be_repeated() -> None:
    model = lockstep.parallelize(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with (
        pytest.raises(ModelError, match=r"trace_nonfinite=True repeats the step"),
        lockstep.guard(model, optimizer, trace_nonfinite=True),
    ):
        pass


def test_a_mask_of_infinity_is_not_where_nan_began() -> None:
    class Mask(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.masked_fill(torch.eye(4, dtype=torch.bool), float("-inf"))

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.mask, self.bad = nn.Linear(4, 4), Mask(), Bad()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.bad(self.mask(self.layer(x)).softmax(1))

    model = lockstep.parallelize(Attention())
    model.bad.where = "backward"
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def body() -> None:
        model(torch.ones(4, 4)).square().mean().backward()
        optimizer.step()

    step = lockstep.guard(model, optimizer, trace_nonfinite=True).run(body)
    assert step.blame.origin.startswith("in the backward of 'bad' (Bad); infinity was first in the")


def test_outputs_that_are_not_found_accuse_no_module() -> None:
    class Out:
        def __init__(self, value: torch.Tensor) -> None:
            self.value = value

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 1)

        def forward(self, x: torch.Tensor) -> Out:
            return Out(self.layer(x))

    model = lockstep.parallelize(Model())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def body() -> None:
        (model(torch.ones(1, 2)).value.sum() * float("nan")).backward()
        optimizer.step()

    step = lockstep.guard(model, optimizer, trace_nonfinite=True).run(body)
    assert step.blame.origin == "behind 'the model' (Model), as in the loss"
