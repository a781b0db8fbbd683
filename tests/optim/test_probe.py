"""Optimizers of unknown classes are tried; what can't be divided takes whole steps on each rank."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

import lockstep
from lockstep.errors import ModelError
from lockstep.optim.probe import Treatment, probe
from tests.nn.models import Digits, Unused
from tests.optim.optimizers import KINDS, Plain, ScheduleFree
from tests.optim.programs import take_steps
from tests.ranks import run_ranks


class Estimating(Plain):
    """As Prodigy, it estimates a distance from all parameters of a group."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            gradients = [p.grad for p in group["params"] if p.grad is not None]
            group["d"] = group.get("d", 1.0) + sum(g.abs().sum().item() for g in gradients)
            for parameter in group["params"]:
                self.update(parameter, group["lr"] / group["d"])


class Clipping(Plain):
    """As Lamb, it divides gradients by a norm over all of them."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        every = [
            p.grad for group in self.param_groups for p in group["params"] if p.grad is not None
        ]
        self.norm = torch.stack([g.norm() for g in every]).norm().clamp(min=1.0).item()
        for group in self.param_groups:
            for parameter in group["params"]:
                self.update(parameter, group["lr"] / self.norm)


class Noisy(Plain):
    """It draws from three generators."""

    def update(self, parameter: nn.Parameter, lr: float) -> None:
        lr *= random.random() * np.random.random()
        super().update(parameter, lr)
        parameter.add_(torch.randn_like(parameter), alpha=lr)


class ByItself(Plain):
    """It has a generator of its own, which ranks seed differently."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.generator = torch.Generator()
        self.generator.manual_seed(torch.initial_seed() % 1000)

    def update(self, parameter: nn.Parameter, lr: float) -> None:
        if parameter.grad is not None:
            noise = torch.rand(parameter.shape, generator=self.generator)
            parameter.sub_(parameter.grad * lr * noise)


class First(Plain):
    """It needs a parameter in each group."""

    def update(self, parameter: nn.Parameter, lr: float) -> None:
        first = self.param_groups[-1]["params"][0]
        super().update(parameter, lr * (1 + first.numel()))


class Everything(Plain):
    """It updates all parameters, whatever its groups have."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.every = [p for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.every:
            self.update(parameter, 0.1)


class Lambda(Plain):
    """It has what can't be copied, and needs it."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.places = (each for each in range(10**9))

    def update(self, parameter: nn.Parameter, lr: float) -> None:
        super().update(parameter, lr / (1 + next(self.places)))


class Summing(ScheduleFree):
    """Its method computes one number from the state of all."""

    @torch.no_grad()
    def _swap(self) -> None:
        total = sum(entry["mean"].sum() for entry in self.state.values())
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(torch.tanh(torch.as_tensor(total)))


class Swapping(ScheduleFree):
    """Its method needs an argument, so it can't be tried."""

    def blend(self, weight: float) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["mean"].mul_(weight)


class Projecting(Plain):
    """Its state has objects of a class of its own."""

    def update(self, parameter: nn.Parameter, lr: float) -> None:
        self.state[parameter]["projector"] = Plain
        super().update(parameter, lr)


class Curved(Plain):
    """It differentiates gradients."""

    def update(self, parameter: nn.Parameter, lr: float) -> None:
        super().update(parameter, lr * self.curvature(parameter))

    @staticmethod
    def curvature(parameter: nn.Parameter) -> float:
        (curvature,) = torch.autograd.grad(parameter.grad.sum(), parameter)
        return curvature.sum().item()


class Unforeseeable(Plain):
    """No two of its steps are alike."""

    def update(self, parameter: nn.Parameter, lr: float) -> None:
        super().update(parameter, lr * random.Random().random())


UNDIVIDED: dict[type[Plain], str] = {
    Estimating: r"group\['d'\] would differ between the ranks",
    Clipping: "its norm would differ between the ranks",
    Noisy: "it draws random numbers",
    ByItself: "it draws random numbers",
    Everything: "changes parameters that aren't in its groups",
    First: "a part of the parameters",
    Lambda: "it can't be copied to try it",
    Summing: "a part of the parameters",
    Projecting: r"ranks can't send each other its state \(TypeError: 'state.projector' is a type",
    Swapping: r"its method blend\(\) uses the state and can't be tried",
}


def of_digits(kind: Callable[[Any], Optimizer]) -> Optimizer:
    torch.manual_seed(0)
    return kind(Digits().parameters())


@pytest.mark.parametrize("kind", [*KINDS, ScheduleFree])
def test_what_updates_each_parameter_by_itself_may_be_divided(kind: Any) -> None:
    verdict = probe(of_digits(kind))
    assert (verdict.treatment, verdict.reason) == (Treatment.DIVIDE, "")


@pytest.mark.parametrize("kind", UNDIVIDED)
def test_what_cannot_be_divided_is_told_with_the_reason(kind: Any) -> None:
    with pytest.raises(ModelError, match=UNDIVIDED[kind]):
        raise ModelError(probe(of_digits(kind)).reason)


class Leading(Plain):
    """It reads a parameter of its first group, as many read the device."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        first = self.param_groups[0]["params"][0]
        for group in self.param_groups:
            for parameter in group["params"]:
                self.update(parameter, group["lr"] * (first.dim() > 0))


class Stacking(Plain):
    """It can't do without gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        every = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        self.largest = torch.stack([p.grad.abs().max() for p in every])
        for parameter in every:
            self.update(parameter, 0.1)


def test_parts_of_ranks_that_lack_groups_are_tried() -> None:
    model = Digits()
    weights = [p for p in model.parameters() if p.dim() > 1]
    biases = [p for p in model.parameters() if p.dim() == 1]
    optimizer = Leading([{"params": biases}, {"params": weights}])
    for groups_by_rank in [], [{0, 1}, {0}]:
        assert probe(optimizer, groups_by_rank).treatment is Treatment.DIVIDE
    for groups_by_rank in [{0, 1}, {1}], [{0, 1}, {1}, set()]:
        assert "it raises IndexError" in probe(optimizer, groups_by_rank).reason
    assert probe(Stacking([model.fc2.bias]), [{0}]).treatment is Treatment.DIVIDE
    assert "it raises RuntimeError" in probe(Stacking([model.fc2.bias]), [{0}, set()]).reason


@pytest.mark.parametrize("kind", [Leading, Stacking])
def test_ranks_without_parameters_have_the_bits_of_one_process(kind: Any) -> None:
    first = Digits()

    def body(rank: int, group: dist.ProcessGroup) -> None:
        models = [lockstep.parallelize(copy.deepcopy(first), process_group=group) for _ in range(2)]
        optimizers = [kind([model.fc2.bias]) for model in models]
        with pytest.warns(UserWarning, match="it raises") if rank == 0 else nullcontext():
            lockstep.shard_optimizer(optimizers[0])
        for model, optimizer in zip(models, optimizers, strict=True):
            take_steps(model, optimizer, rank)
        assert torch.equal(models[0].fc2.bias, models[1].fc2.bias)

    run_ranks(3, body)


class Starting(Plain):
    """It draws random numbers in its first step alone."""

    def update(self, parameter: nn.Parameter, lr: float) -> None:
        if parameter not in self.state:
            self.state[parameter]["scale"] = torch.rand_like(parameter)
        super().update(parameter, lr)


class Rounding(Estimating):
    """It rounds at random what is in less than double precision."""

    def update(self, parameter: nn.Parameter, lr: float) -> None:
        if parameter.dtype is not torch.double:
            lr *= random.random()
        super().update(parameter, lr)


def test_what_draws_in_some_steps_or_dtypes_alone_is_known_to_draw() -> None:
    assert probe(of_digits(Starting)).may_draw
    assert probe(of_digits(Rounding)).may_draw
    assert not probe(of_digits(Estimating)).may_draw


def test_what_no_rank_could_repeat_is_refused() -> None:
    assert probe(of_digits(Unforeseeable)).treatment is Treatment.REFUSE


def test_what_differentiates_gradients_is_refused_with_advice() -> None:
    treatment, reason, *_ = probe(of_digits(Curved))
    assert treatment is Treatment.REFUSE
    assert "it differentiates gradients" in reason
    assert "So train with it in one process" in reason


def test_a_learning_rate_of_a_warm_up_is_no_reason() -> None:
    optimizer = of_digits(Plain)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(step / 10, 1.0))
    assert optimizer.param_groups[0]["lr"] == 0
    assert probe(optimizer).treatment is Treatment.DIVIDE


@pytest.mark.parametrize("kind", [Estimating, Noisy, ByItself, ScheduleFree])
def test_a_trial_leaves_everything_as_it_was(kind: Any) -> None:
    def everything(optimizer: Any) -> Any:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        return (
            [p.detach().clone() for p in parameters],
            [p._version for p in parameters],
            {key: value for key, value in vars(optimizer).items() if key != "generator"},
            torch.get_rng_state(),
            random.getstate(),
            [*np.random.get_state()[1]],
            optimizer.generator.get_state() if kind is ByItself else None,
        )

    optimizer = of_digits(kind)
    before = copy.deepcopy(everything(optimizer))
    first = probe(optimizer)
    after = everything(optimizer)
    assert str(before[2]) == str(after[2])
    torch.testing.assert_close(before[:2] + before[3:], after[:2] + after[3:], rtol=0, atol=0)
    assert probe(optimizer) == first


@pytest.mark.parametrize("backend", ["threads", "gloo"])
@pytest.mark.parametrize("kind", [Estimating, Noisy, ByItself, First, Everything])
def test_what_is_left_undivided_has_the_bits_of_one_process(kind: Any, backend: str) -> None:
    torch.manual_seed(0)
    first = Unused()
    generators = torch.get_rng_state(), random.getstate(), np.random.get_state()

    def begin() -> None:
        torch.set_rng_state(generators[0])
        random.setstate(generators[1])
        np.random.set_state(generators[2])

    begin()
    alone = lockstep.parallelize(copy.deepcopy(first))
    take_steps(alone, kind(alone.parameters()), 0)
    begin()

    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = lockstep.parallelize(copy.deepcopy(first), process_group=group)
        optimizer = kind(model.parameters())
        if kind is ByItself and rank:
            optimizer.generator.manual_seed(77)
        with warnings.catch_warnings(record=True):
            lockstep.shard_optimizer(optimizer, undivided="always")
        take_steps(model, optimizer, 0)
        for expected, found in zip(alone.parameters(), model.parameters(), strict=True):
            assert torch.equal(expected, found)
        assert optimizer.state_dict(rank0_only=True)["param_groups"]

    # Threads share the global generators.
    run_ranks(1 if kind is Noisy else 2, body, backend=backend)


class Exchanging(Plain):
    """It divides its steps itself, and rank 0 would wait for the others if it tried one."""

    group: dist.ProcessGroup

    def update(self, parameter: nn.Parameter, lr: float) -> None:
        every = [torch.empty_like(parameter) for _ in range(self.group.size())]
        dist.all_gather(every, parameter.grad.contiguous(), group=self.group)
        parameter.sub_(every[0], alpha=lr)


def test_what_divides_its_steps_itself_is_left_undivided_untried() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = lockstep.parallelize(Digits(), process_group=group)
        optimizer = Exchanging(model.parameters())
        optimizer.group = group
        told = r"its steps may call all_gather\(\)"
        with pytest.warns(UserWarning, match=told) if rank == 0 else nullcontext():
            lockstep.shard_optimizer(optimizer)
        take_steps(model, optimizer, rank)

    run_ranks(2, body)


def test_one_warning_names_the_reason() -> None:
    told = r"Estimating can't be divided .*: group\['d'\] would differ between the ranks"

    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = lockstep.parallelize(Digits(), process_group=group)
        with pytest.raises(ModelError, match=told):
            lockstep.shard_optimizer(Estimating(model.parameters()), undivided="error")
        with pytest.raises(ValueError, match="undivided is 'no'"):
            lockstep.shard_optimizer(Plain(model.parameters()), undivided="no")
        with pytest.warns(UserWarning, match=told) if rank == 0 else nullcontext():
            lockstep.shard_optimizer(Estimating(model.parameters()))
        with pytest.warns(UserWarning, match=told) if rank == 0 else nullcontext():
            lockstep.ZeroRedundancyOptimizer(model.parameters(), Estimating, group)

    assert lockstep.ZeroRedundancyOptimizer  # imported in the main thread, as it ignores warnings
    run_ranks(2, body)


@pytest.mark.long
def test_ranks_whose_generators_differ_draw_alike_and_keep_theirs() -> None:
    def body(world: lockstep.World) -> tuple[list[float], float]:
        model = lockstep.parallelize(Digits())
        optimizer = lockstep.shard_optimizer(Noisy(model.parameters()), undivided="always")
        torch.manual_seed(world.rank)
        random.seed(world.rank)
        np.random.seed(world.rank)
        take_steps(model, optimizer, world.rank)
        return model.fc2.bias.tolist(), torch.rand(1).item()

    (first, drawn), (second, other) = lockstep.launch(body, 2)
    assert first == second
    torch.manual_seed(1)
    assert other == torch.rand(1).item() != drawn
