"""Hooks that users hang on parameters, such as optimizers that step inside of the backward."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lockstep
from lockstep.errors import ModelError
from tests.nn.parallel import in_place, net, parts, wrapped
from tests.ranks import run_ranks

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # of what torch imports there
    from torch.distributed.optim import _apply_optimizer_in_backward

BOTH = pytest.mark.parametrize("parallel", [in_place, wrapped], ids=["in place", "wrapped"])
TIMES = ["before", "after", "after a step"]


def step_in_hooks(model: nn.Module) -> list:
    """As the tutorial "How to save memory by fusing the optimizer step into the backward pass"."""
    optimizers = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in model.parameters()}

    def step(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    return [p.register_post_accumulate_grad_hook(step) for p in model.parameters()]


def step_by_hand(model: nn.Module) -> None:
    def step(parameter: torch.Tensor) -> None:
        parameter.data.sub_(parameter.grad, alpha=0.1)
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)


def step_as_torchs(model: nn.Module) -> None:
    options = {"lr": 0.1, "momentum": 0.9}
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), options)


def run(
    parallel: Callable, hang: Callable, rank: int, group: dist.ProcessGroup, when: str
) -> list[torch.Tensor]:
    model = net()
    if when == "before":
        hang(model)
    trained = parallel(model, group)
    if when == "after":
        hang(model)
    for step in range(4):
        if when == "after a step" and step == 1:
            hang(model)
        trained(parts(2)[rank], branch=step % 2).square().mean().backward()
        if when == "after a step" and step == 0:
            trained.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())
    return [parameter.detach().clone() for parameter in model.parameters()]


def alone(hang: Callable, when: str) -> list[torch.Tensor]:
    model = net()
    if when != "after a step":
        hang(model)
    for step in range(4):
        if when == "after a step" and step == 1:
            model.zero_grad()
            hang(model)
        sum(model(x, branch=step % 2).square().mean() / 2 for x in parts(2)).backward()
    return [parameter.detach() for parameter in model.parameters()]


@BOTH
@pytest.mark.parametrize("when", TIMES)
@pytest.mark.parametrize("hang", [step_in_hooks, step_by_hand, step_as_torchs])
def test_an_optimizer_that_steps_in_hooks_steps_with_the_mean(
    hang: Callable, when: str, parallel: Callable
) -> None:
    expected = alone(hang, when)
    for result in run_ranks(2, lambda rank, group: run(parallel, hang, rank, group, when)):
        torch.testing.assert_close(result, expected, rtol=1e-10, atol=1e-12)


def test_an_optimizer_that_steps_too_early_is_refused() -> None:
    """Where lockstep cannot keep a hook back: on the node that accumulates the gradient."""

    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = in_place(net(), group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        node = torch.autograd.graph.get_gradient_edge(model.first.weight).node
        node.register_hook(lambda *_: optimizer.step())
        before = copy.deepcopy(list(model.parameters()))
        with pytest.raises(ModelError, match="SGD, steps inside of a backward of this Net"):
            model(parts(2)[rank]).square().mean().backward()
        assert all(map(torch.equal, before, model.parameters()))

    run_ranks(2, body)


@pytest.mark.parametrize("when", TIMES)
def test_hooks_of_others_see_the_mean(when: str) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model, seen = net(), []

        def hang() -> None:
            handles.append(
                model.first.weight.register_post_accumulate_grad_hook(
                    lambda parameter: seen.append(parameter.grad.clone())
                )
            )

        handles: list = []
        if when == "before":
            hang()
        lockstep.parallelize(model, process_group=group)
        for step in range(3):
            if len(handles) == 0 and step == (when == "after a step"):
                hang()
            model.zero_grad()
            model(parts(2)[rank]).sum().backward()
        assert len(seen) == 3 - (when == "after a step")
        assert torch.equal(seen[-1], model.first.weight.grad)
        with lockstep.no_sync(model):
            model.zero_grad()
            model(parts(2)[rank]).sum().backward()
        assert torch.equal(seen[-1], model.first.weight.grad)  # this rank's own, and at once
        handles[0].remove()
        number = len(seen)
        model(parts(2)[rank]).sum().backward()
        assert len(seen) == number

    run_ranks(2, body)


def test_hooks_run_on_ranks_that_have_no_gradient_of_their_own() -> None:
    """An optimizer that steps in them has to step on every rank."""

    def body(rank: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
        model = in_place(net(), group)
        step_in_hooks(model)
        for _ in range(3):
            model(parts(2)[rank], branch=rank).square().mean().backward()
        return [parameter.detach() for parameter in model.parameters()]

    first, second = run_ranks(2, body)
    assert all(map(torch.equal, first, second))


def test_hooks_of_others_outlive_the_wrapper() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model, seen = net(), []
        trained = wrapped(model, group)
        handle = model.first.weight.register_post_accumulate_grad_hook(
            lambda parameter: seen.append(rank)
        )
        trained(parts(2)[rank]).sum().backward()
        del trained
        for _ in range(2):
            model(parts(2)[rank]).sum().backward()
        assert len(seen) == 3
        handle.remove()
        model(parts(2)[rank]).sum().backward()
        assert len(seen) == 3

    run_ranks(2, body)


def test_a_handle_that_a_model_holds_can_be_copied() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        in_place(net(), group)
        model = in_place(copy.deepcopy(net()), group)  # a copy of a parallel one, for all it shows
        model.handle = model.first.weight.register_post_accumulate_grad_hook(print)
        for copied in (copy.deepcopy(model), copy.copy(model), pickle.loads(pickle.dumps(model))):
            assert copied.first.weight.shape == model.first.weight.shape
        model.handle.remove()

    run_ranks(2, body)
