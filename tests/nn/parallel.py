"""A network, data for each rank, and the ways to make a model parallel."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lockstep


class Net(nn.Module):
    """Two layers, a middle to call, a counter to set, and branches to leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.second = nn.Linear(6, 3)
        self.branches = nn.ModuleList(nn.Linear(6, 3) for _ in range(3))
        self.count = 0

    def forward(self, x: torch.Tensor, branch: int | None = None) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        out = self.second(hidden)
        return out if branch is None else out + self.branches[branch](hidden)

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.first(x))


def wrapped(model: nn.Module, group: dist.ProcessGroup, **options: object) -> nn.Module:
    return lockstep.DistributedDataParallel(model, process_group=group, **options)


def in_place(model: nn.Module, group: dist.ProcessGroup, **options: object) -> nn.Module:
    return lockstep.parallelize(model, process_group=group, **options)


BOTH = pytest.mark.parametrize("parallel", [wrapped, in_place])


def _build_net() -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Net().double()


_NET = _build_net()


def net() -> Net:
    """The same network every time, on every rank. (Ranks, as threads, share torch's seed.)"""
    return copy.deepcopy(_NET)


def parts(world_size: int, rows: int = 4) -> torch.Tensor:
    """The same data every time, a part for each rank."""
    generator = torch.Generator().manual_seed(5)
    return torch.randn(world_size, rows, 4, dtype=torch.float64, generator=generator)


def mean_gradients(model: nn.Module, data: torch.Tensor) -> list[torch.Tensor | None]:
    """The mean over the parts, of a loss that is a mean itself."""
    alone = copy.deepcopy(model)
    alone(data.flatten(0, 1)).square().mean().backward()
    return [p.grad for p in alone.parameters()]
