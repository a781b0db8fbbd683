"""Optimizers: torch's, and such as people write, which aren't element-wise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.01),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Adamax": lambda p: torch.optim.Adamax(p),
    "NAdam": lambda p: torch.optim.NAdam(p),
    "RAdam": lambda p: torch.optim.RAdam(p),
    "Rprop": lambda p: torch.optim.Rprop(p),
    "ASGD": lambda p: torch.optim.ASGD(p),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
}


class Plain(torch.optim.SGD):
    """A step of one's own, over the parameters of the groups."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, lr=lr)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.update(parameter, group["lr"])

    def update(self, parameter: nn.Parameter, lr: float) -> None:
        if parameter.grad is not None:
            parameter.add_(parameter.grad, alpha=-lr)


class Replacing(Plain):
    """It gives parameters other data, as older code does."""

    def update(self, parameter: nn.Parameter, lr: float) -> None:
        if parameter.grad is not None:
            parameter.data = parameter.data - lr * parameter.grad.data


class ByAttribute(Plain):
    """It treats parameters by an attribute that the program has set."""

    def update(self, parameter: nn.Parameter, lr: float) -> None:
        super().update(parameter, lr * getattr(parameter, "lr_scale", 1.0))


class Trained(Plain):
    """It asks whether a parameter is trained, and decays those that have no gradient too."""

    def update(self, parameter: nn.Parameter, lr: float) -> None:
        if parameter.requires_grad:
            gradient = parameter.grad
            parameter.mul_(0.99)
            parameter.sub_(torch.zeros_like(parameter) if gradient is None else gradient * lr)


class ByParameter(Plain):
    """It has dictionaries by parameter, and by its id."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        every = [p for group in self.param_groups for p in group["params"]]
        self.scales = {p: 1 / (1 + index) for index, p in enumerate(every)}
        self.places = {id(p): index for index, p in enumerate(every)}

    def update(self, parameter: nn.Parameter, lr: float) -> None:
        super().update(parameter, lr * self.scales[parameter] * 0.9 ** self.places[id(parameter)])


class Clamped(torch.optim.Adam):
    """It changes the parameters after the step of its base class."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.clamp_(-0.1, 0.1)
        return result


KINDS = [Plain, Replacing, ByAttribute, Trained, ByParameter, Clamped]


class ScheduleFree(Plain):
    """It has parameters for training and others, their average, for evaluation."""

    def update(self, parameter: nn.Parameter, lr: float) -> None:
        super().update(parameter, lr)
        state = self.state[parameter]
        if "mean" not in state:
            state["mean"] = parameter.clone()
        state["mean"].lerp_(parameter, 0.5)

    def eval(self) -> None:
        self._swap()

    def train(self) -> None:
        self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                mean = self.state[parameter]["mean"]
                mean.copy_(parameter.clone().copy_(parameter), non_blocking=False)
                parameter.copy_(mean.mul(0.5))

    def num_averaged(self) -> int:
        return len(self.state)
