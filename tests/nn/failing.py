"""A network whose backward fails where a test wants it to."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

import lockstep
from tests.nn.models import Refusing


class Layers(nn.Module):
    """Layers with a bucket each; a backward may fail behind one of them, or leave some out."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(size, size, dtype=torch.float64) for _ in range(6))
        generator = torch.Generator().manual_seed(1)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -0.5, 0.5, generator=generator)

    def forward(self, x, fails_at=None, without=()):
        for index, layer in enumerate(self.layers):
            if index == fails_at:
                x = Refusing.apply(x)
            if index not in without:
                x = torch.tanh(layer(x))
        return x.square().sum()


def layers(size: int, group: dist.ProcessGroup) -> nn.Module:
    return lockstep.parallelize(Layers(size), process_group=group, bucket_cap_mb=1e-6)


def batch(rank: int, size: int, step: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(3, size, generator=generator, dtype=torch.float64)


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
