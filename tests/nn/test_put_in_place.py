"""Parameters put in their places without telling torch, after a model was made parallel."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lockstep
from lockstep import errors
from lockstep.errors import ModelMismatch
from tests.nn.parallel import BOTH, in_place, net, parts
from tests.ranks import BACKENDS, Backend, run_ranks
from tests.same import assert_same


@pytest.fixture(autouse=True)
def compiled_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """An earlier test of this process may have compiled something."""
    monkeypatch.setattr("lockstep.nn.forward_hooks.has_compiled", lambda: False)


def replace_parameters(model: nn.Module) -> None:
    for part in model.modules():
        for name, parameter in part._parameters.items():
            part._parameters[name] = nn.Parameter(2 * parameter.detach())


def replace_modules(model: nn.Module) -> None:
    for name, part in model._modules.items():
        model._modules[name] = copy.deepcopy(part)


def add_in_place(model: nn.Module) -> None:
    shift = nn.Parameter(torch.ones(3, dtype=torch.float64))
    model.second._parameters["shift"] = shift
    model.second.register_forward_hook(lambda layer, _, out: out + layer.shift)


def overwrite(model: nn.Module) -> None:
    # As torch.__future__.set_overwrite_module_params_on_conversion(True), which is for all ranks.
    for part in model.modules():
        for name, parameter in part._parameters.items():
            part._parameters[name] = nn.Parameter(parameter.detach().double())


def take_step(model: nn.Module, x: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    model(x).square().sum().backward()
    optimizer.step()


@BOTH
@pytest.mark.parametrize("is_alone", [True, False], ids=["alone", "beside a model"])
@pytest.mark.parametrize("is_new", [True, False], ids=["new optimizer", "old optimizer"])
@pytest.mark.parametrize("change", [replace_parameters, replace_modules, add_in_place, overwrite])
def test_what_is_put_in_behind_torchs_back_is_never_trained_apart(
    change: Callable, is_new: bool, is_alone: bool, parallel: Callable
) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
        model, other = net(), net()
        if not is_alone:
            parallel(other, group)
        trained, x = parallel(model, group), parts(2)[rank]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for time in range(4):
            if time == 2:
                change(model)
                if is_new:
                    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                with pytest.raises(errors.ParameterChanged, match=r"' was put in its place"):
                    take_step(trained, x, optimizer)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model.zero_grad()
            take_step(trained, x, optimizer)
        return [p.detach() for p in model.parameters()]

    mine, theirs = run_ranks(2, body)
    assert all(map(torch.equal, mine, theirs))


@BOTH
@pytest.mark.parametrize("is_alone", [True, False], ids=["alone", "beside a model"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_all_parameters_that_one_rank_puts_in_behind_torchs_back_are_named_on_all(
    backend: Backend, is_alone: bool, parallel: Callable
) -> None:
    """The other rank waits in a backward, of which no hook tells this one."""

    def body(rank: int, group: dist.ProcessGroup) -> None:
        model, other = net(), net()
        if not is_alone:
            parallel(other, group)
        trained, x = parallel(model, group), parts(2)[rank]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        take_step(trained, x, optimizer)
        if rank == 1:
            replace_parameters(model)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        with pytest.raises(ModelMismatch, match=r"'first\.weight' is a new parameter"):
            take_step(trained, x, optimizer)
        assert_same(model.parameters(), before, tolerance=0)

    run_ranks(2, body, backend=backend)


def test_a_rank_without_backward_takes_what_is_put_in_once() -> None:
    """The backward of the other rank has taken it by then."""

    def body(rank: int, group: dist.ProcessGroup) -> list[torch.Tensor | None]:
        model = in_place(net(), group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        take_step(model, parts(2)[rank], optimizer)
        loss = model(parts(2)[rank]).square().sum()
        replace_parameters(model)
        if rank == 1:
            loss.backward()
        optimizer.step()
        model.zero_grad()
        model(parts(2)[rank]).square().sum().backward()
        return [parameter.grad for parameter in model.parameters()]

    first, second = run_ranks(2, body)
    for mine, theirs in zip(first, second, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


def set_parameters(model: nn.Module) -> None:
    for part in model.modules():
        for name, parameter in [*part.named_parameters(recurse=False)]:
            setattr(part, name, nn.Parameter(2 * parameter.detach()))


def assign_state(model: nn.Module) -> None:
    state = {name: 2 * value for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


@BOTH
@pytest.mark.parametrize("time", [0, 1, 2])
@pytest.mark.parametrize(
    "change", [set_parameters, assign_state, replace_parameters, replace_modules, overwrite]
)
def test_what_is_put_in_place_before_a_backward_is_known_from_then_on(
    change: Callable, time: int, parallel: Callable
) -> None:
    """The backward adds to the parameters of its forward, as in one process."""

    def gradients(model: nn.Module, trained: nn.Module, x: torch.Tensor) -> list:
        found = []
        for now in range(time + 3):
            model.zero_grad()
            loss = trained(x).square().mean()
            if now == time:
                change(model)
            loss.backward()
            found.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
        return found

    def body(rank: int, group: dist.ProcessGroup) -> list:
        model = net()
        return gradients(model, parallel(model, group), parts(2)[rank])

    alone = net()
    expected = gradients(alone, alone, parts(2).flatten(0, 1))
    assert {each is None for each in expected[time]} == {True}
    assert {each is None for each in expected[time + 1]} == {True, False}
    for found in run_ranks(2, body):
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("rank_with", [0, 1])
def test_what_one_rank_alone_puts_in_behind_torchs_back_is_named_on_all(rank_with: int) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = in_place(net(), group)
        loss = model(parts(2)[rank]).sum()
        if rank == rank_with:
            replace_parameters(model)
        with pytest.raises(
            errors.ModelMismatch, match=r"'first\.weight' is a .*parameter \(6, 4\)"
        ):
            loss.backward()

    run_ranks(2, body)


def test_a_gradient_behind_torchs_back_that_one_rank_has_is_named_on_all() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
        model, x = in_place(net(), group), parts(2)[rank]
        model.branches[0]._parameters["weight"] = nn.Parameter(torch.ones(3, 6).double())
        branch = 0 if rank else None
        with pytest.raises(errors.ParameterChanged, match=r"'branches\.0\.weight' was put"):
            model(x, branch).sum().backward()
        model.zero_grad()
        model(x, branch).sum().backward()
        return [model.branches[0].weight.grad]

    (first,), (second,) = run_ranks(2, body)
    assert torch.equal(first, second)


class WithoutCalls(nn.Module):
    """A loss whose forward calls no module, so that none of their hooks runs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, dtype=torch.float64))

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight).square().sum()


@pytest.mark.parametrize("change", [set_parameters, assign_state, replace_parameters])
def test_all_parameters_of_a_model_that_is_not_called_are_never_trained_apart(
    change: Callable,
) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
        model, x = in_place(WithoutCalls(), group), parts(2)[rank]
        for time in range(4):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            if time == 2:
                change(model)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
                model.loss(x).backward()
                with pytest.raises(errors.ParameterChanged, match=r"'weight' was put in its place"):
                    optimizer.step()
            model.zero_grad()
            model.loss(x).backward()
            optimizer.step()
        return [model.weight.detach(), model.weight.grad]

    mine, theirs = run_ranks(2, body)
    assert all(map(torch.equal, mine, theirs))


def train_by_hand(model: nn.Module, x: torch.Tensor) -> None:
    model.zero_grad()
    model(x).square().sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= 0.01 * parameter.grad


@BOTH
@pytest.mark.parametrize("evaluates", [True, False])
@pytest.mark.parametrize("change", [replace_parameters, replace_modules, overwrite])
def test_what_is_put_in_place_and_trained_by_hand_is_named(
    change: Callable, evaluates: bool, parallel: Callable
) -> None:
    """No optimizer steps, and no gradient of former parameters comes."""

    def body(rank: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
        model, x = net(), parts(2)[rank]
        trained = parallel(model, group)
        for time in range(4):
            if time == 2:
                if evaluates:
                    with torch.no_grad():
                        trained(x)
                change(model)
                before = [parameter.detach().clone() for parameter in model.parameters()]
                with pytest.raises(errors.ParameterChanged, match=r"'first\.weight' was put in"):
                    train_by_hand(trained, x)
                assert_same(model.parameters(), before, tolerance=0)
            train_by_hand(trained, x)
        return [p.detach() for p in model.parameters()]

    mine, theirs = run_ranks(2, body)
    assert all(map(torch.equal, mine, theirs))


class Gate(nn.Module):
    """A module in whose forward a thread stays."""

    def __init__(self) -> None:
        super().__init__()
        self.is_in, self.may_leave = threading.Event(), threading.Event()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.is_in.set()
        self.may_leave.wait(60)
        return x

    @torch.no_grad()
    def evaluate(self) -> None:
        self(torch.ones(1))


def test_what_is_put_in_place_is_named_while_another_thread_evaluates() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model, x, gate = in_place(net(), group), parts(2)[rank], Gate()
        train_by_hand(model, x)
        evaluation = threading.Thread(target=gate.evaluate)
        evaluation.start()
        gate.is_in.wait(60)
        replace_parameters(model)
        with pytest.raises(errors.ParameterChanged, match=r"'first\.weight' was put in"):
            train_by_hand(model, x)
        gate.may_leave.set()
        evaluation.join()

    run_ranks(2, body)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_one_rank_puts_in_place_and_trains_by_hand_is_named_on_all(backend: Backend) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model, x = in_place(net(), group), parts(2)[rank]
        train_by_hand(model, x)
        if rank == 1:
            replace_parameters(model)
        with pytest.raises(ModelMismatch, match=r"'first\.weight' is a new parameter"):
            train_by_hand(model, x)

    run_ranks(2, body, backend=backend)


def test_what_is_put_in_place_of_a_model_that_is_not_called_is_named_with_a_mean() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
        model, x = in_place(WithoutCalls(), group), parts(2)[rank]
        for time in range(3):
            if time == 1:
                replace_parameters(model)
                with pytest.raises(errors.ParameterChanged, match=r"'weight' was put in its place"):
                    lockstep.mean(model.loss(x), weight=1, process_group=group).backward()
                model.zero_grad()
            lockstep.mean(model.loss(x), weight=1, process_group=group).backward()
        return [model.weight.grad]

    (mine,), (theirs,) = run_ranks(2, body)
    assert torch.equal(mine, theirs)
