"""Replicas on a GPU: a network, its samples, and where they run."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from lockstep.nn import DataParallel, data_parallel, gather, parallel_apply, replicate, scatter
from tests.gpu.accelerator import GPU, NEEDED

# A backward that waits for itself is to be found out soon.
SECONDS = 100

MARKS = [
    *NEEDED,
    pytest.mark.keeps_descriptors("a GPU opens some when it is first used, and keeps them"),
    pytest.mark.timeout(SECONDS),
    pytest.mark.forks,
]

FIRST = str(GPU)
TWICE, THREE_TIMES = [FIRST] * 2, [FIRST] * 3
MIXED = ["cpu", FIRST]


@pytest.fixture(scope="module", autouse=True)
def device_has_begun() -> None:
    """Before what a test must leave behind is looked at: it sets a variable, for one thing."""
    DataParallel(nn.Linear(2, 2, device=GPU), TWICE)(torch.ones(2, 2)).sum().backward()
    torch.accelerator.synchronize()


class Net(nn.Module):
    """Shared weights, a buffer, and a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.again = self.first
        self.norm = nn.LayerNorm(6)
        self.last = nn.Linear(6, 3)
        self.register_buffer("scale", torch.rand(6))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        hidden = torch.tanh(self.again(torch.tanh(self.first(x))))
        return self.last(self.norm(hidden) + x * self.scale)


def replicable() -> Net:
    torch.manual_seed(3)
    return Net()


def samples(rows: int = 11) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, 6, dtype=torch.float64, generator=generator)


def gradients_of(model: nn.Module) -> list[torch.Tensor | None]:
    torch.accelerator.synchronize()
    return [None if p.grad is None else p.grad.cpu() for p in model.parameters()]


def assert_close(mine: list, theirs: list, tolerance: float = 1e-10) -> None:
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def home_of(devices: list) -> torch.device:
    return torch.device("cpu") if devices[0] in ("cpu", -1) else GPU


def by_module(model: nn.Module, devices: list) -> Callable[[torch.Tensor], torch.Tensor]:
    return DataParallel(model, devices)


def by_function(model: nn.Module, devices: list) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: data_parallel(model, x, devices)


def by_primitives(model: nn.Module, devices: list) -> Callable[[torch.Tensor], torch.Tensor]:
    def call(x: torch.Tensor) -> torch.Tensor:
        parts = scatter(x, devices)
        used = devices[: len(parts)]
        outputs = parallel_apply(replicate(model, used), parts, devices=used)
        return gather(outputs, used[0])

    return call


WAYS = pytest.mark.parametrize("way", [by_module, by_function, by_primitives])
