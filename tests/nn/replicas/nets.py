"""A network with all that a replica needs a copy of, and a batch for it."""

from __future__ import annotations

import torch
from torch import nn

TWO, THREE = ["cpu"] * 2, ["cpu"] * 3


class Net(nn.Module):
    """Several ways in, shared weights, and things that are no tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 3)
        self.again = self.first
        self.scale = 1.0
        self.register_buffer("calls", torch.zeros(()))
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.second(torch.tanh(self.again(torch.tanh(self.first(x))))) * self.scale

    def middle(self, x: torch.Tensor, *, factor: float = 1.0) -> torch.Tensor:
        return torch.tanh(self.first(x)) * factor

    def where(self) -> str:
        return type(self).__name__

    @property
    def width(self) -> int:
        return self.second.out_features


def replicable() -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return Net()


def batch(rows: int = 7) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, 4, dtype=torch.float64, generator=generator)
