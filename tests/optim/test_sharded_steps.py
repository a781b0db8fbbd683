"""Hooks, closures and gradients of a sharded step are those of an unsharded one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import lockstep
from lockstep.optim.probe import probe
from tests.counts import pairs
from tests.nn.models import Digits
from tests.optim.optimizers import Plain
from tests.optim.programs import adamw, check_same_bits, losses

CLOSURES = {"by position": True, "by name": False}


@pytest.mark.parametrize("by_position", CLOSURES.values(), ids=CLOSURES)
def test_hooks_see_the_closure_before_it_is_called(by_position: bool) -> None:
    def program(model: nn.Module, shard: Any, rank: int) -> list[Any]:
        optimizer, events = shard(adamw(model.parameters())), list[Any]()

        def note(_: Optimizer, args: Any, options: Any) -> None:
            events.append((len(args), [*options]))

        optimizer.register_step_pre_hook(note)
        optimizer.register_step_post_hook(note)
        for step in range(3):

            def closure(step: int = step) -> torch.Tensor:
                events.append("closure")
                optimizer.zero_grad()
                (loss,) = losses(model, rank, 1, step)
                loss.backward()
                return loss

            loss = optimizer.step(closure) if by_position else optimizer.step(closure=closure)
            events.append(loss.item())
        return events

    check_same_bits(program)


def test_hooks_that_were_there_before_see_the_programs_parameters() -> None:
    def program(model: nn.Module, shard: Any, rank: int) -> list[Any]:
        optimizer, seen, ids = (
            Plain(model.parameters()),
            list[Any](),
            {*map(id, model.parameters())},
        )

        def note(each: Optimizer, *_: Any) -> None:
            seen.append({id(p) for group in each.param_groups for p in group["params"]} == ids)

        optimizer.register_step_pre_hook(note)
        optimizer.register_step_post_hook(note)
        optimizer = shard(optimizer)
        for loss in losses(model, rank, 2):
            loss.backward()
            optimizer.step()
        assert seen == [True] * 4
        return seen

    check_same_bits(program)


def test_a_hook_may_give_another_closure() -> None:
    def program(model: nn.Module, shard: Any, rank: int) -> list[Any]:
        optimizer = shard(adamw(model.parameters()))
        optimizer.register_step_pre_hook(lambda each, *_: ((each, lambda: "another"), {}))
        found = []
        for loss in losses(model, rank, 3):
            loss.backward()
            found.append(optimizer.step())
            optimizer.zero_grad()
        return found

    check_same_bits(program)


def test_a_parameter_given_twice_is_clipped_twice() -> None:
    def program(model: nn.Module, shard: Any, rank: int) -> list[Any]:
        optimizer, parameters = shard(adamw(model.parameters())), [*model.parameters()]
        found = []
        for loss in losses(model, rank, 3):
            loss.backward()
            twice = [*parameters, parameters[1], parameters[1], parameters[4]]
            found.append(lockstep.clip_grad_norm_(twice, 0.01).item())
            found += [parameter.grad.tolist() for parameter in parameters]
            optimizer.step()
            optimizer.zero_grad()
        return found

    check_same_bits(program)


@pytest.mark.parametrize("backend", ["threads", "gloo"])
def test_a_step_leaves_the_gradients_as_they_are(backend: str) -> None:
    def program(model: nn.Module, shard: Any, rank: int) -> None:
        options = {"lr": 0.1, "momentum": 0.9, "nesterov": True, "foreach": True}
        groups = [{"params": [parameter]} for parameter in model.parameters()]
        optimizer = shard(torch.optim.SGD(groups, **options))
        for loss in losses(model, rank, 3):
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            before = [parameter.grad.clone() for parameter in model.parameters()]
            optimizer.step()
            if lockstep.optim.sharding_of(optimizer) is not None:  # torch's alone changes them
                for gradient, parameter in zip(before, model.parameters(), strict=True):
                    assert torch.equal(gradient, parameter.grad)
            optimizer.zero_grad()

    check_same_bits(program, backend=backend)


class InPlace(Plain):
    """It decays weights by way of gradients, and normalizes these, in place."""

    def update(self, parameter: nn.Parameter, lr: float) -> None:
        if parameter.grad is not None:
            parameter.grad.add_(parameter, alpha=0.1)
            parameter.grad.div_(parameter.grad.norm())
        super().update(parameter, lr)


def nesterov(parameters: Any) -> Optimizer:
    return Named(parameters, lr=0.1, momentum=0.9, nesterov=True, foreach=True)


class Named(torch.optim.SGD):
    """Its parameters are updated whole."""


@pairs("kind, reads, backend", [InPlace, nesterov], [False, True], ["threads", "gloo"])
def test_gradients_that_an_optimizer_changes_in_place_stay_as_they_are(
    kind: Any, reads: bool, backend: str
) -> None:
    def program(model: nn.Module, shard: Any, rank: int) -> None:
        optimizer = shard(kind(model.parameters()))
        is_sharded = lockstep.optim.sharding_of(optimizer) is not None
        for number, loss in enumerate(losses(model, rank, 4)):
            optimizer.zero_grad()
            loss.backward()
            kept = [parameter.grad for parameter in model.parameters()] if reads else []
            before = [gradient.clone() for gradient in kept]
            optimizer.step()
            gradients = [parameter.grad for parameter in model.parameters()]
            if is_sharded:
                seen[rank, number] = [gradient.clone() for gradient in gradients]
                assert all(a is b for a, b in zip(kept, gradients, strict=False))
                assert all(map(torch.equal, before, kept))

    seen: dict[tuple[int, int], list[torch.Tensor]] = {}
    check_same_bits(program, backend=backend)
    for number in range(4):
        assert all(map(torch.equal, seen[0, number], seen[1, number]))


class Dropping(Plain):
    def update(self, parameter: nn.Parameter, lr: float) -> None:
        super().update(parameter, lr)
        parameter.grad = None


class Clearing(Plain):
    def step(self, closure: Any = None) -> None:
        super().step()
        self.zero_grad(set_to_none=False)


@pytest.mark.filterwarnings("ignore:.* can't be divided")
@pytest.mark.parametrize("kind", [Dropping, Clearing])
def test_an_optimizer_that_drops_gradients_drops_all(kind: Any) -> None:
    def program(model: nn.Module, shard: Any, rank: int) -> None:
        optimizer = shard(kind(model.parameters()))
        for loss in losses(model, rank, 3):
            loss.backward()
            optimizer.step()

    found = probe(kind(Digits().parameters()))
    assert found.drops_gradients or found.reason.startswith("it drops gradients")
    assert found.drops_gradients == (kind is Dropping)
    check_same_bits(program)
