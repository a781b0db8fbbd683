"""The models of the benchmarks, each with another bottleneck, and the form of their figures.

Convolutions have few parameters for much arithmetic, and the MLP many for little; 200 small layers
are overhead above all; the transformer has much of both; 1,000 tiny parameters are gradients above
all.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from lockstep.demo import ConvNet


class Workload(NamedTuple):
    """A model, a rank's batch for a step, the loss, and how many batches take turns."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[int], tuple[torch.Tensor, torch.Tensor]]
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    num_batches: int = 1


class SmallLayers(nn.Module):
    """200 residual layers of width 64. (Otherwise gradients become slow denormal numbers.)"""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(200))
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + 0.1 * torch.tanh(layer(x))
        return self.head(x)


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
    )


class Transformer(nn.Module):
    """A language model of 9 M parameters: six blocks of width 256 over 8,192 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8192, 256)
        self.position = nn.Parameter(torch.zeros(64, 256))
        block = nn.TransformerEncoderLayer(256, 8, 1024, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(block, 6, enable_nested_tensor=False)
        self.head = nn.Linear(256, 8192)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embed(tokens) + self.position)).flatten(0, 1)


class TinyParameters(nn.Module):
    """1,000 parameters of 16 numbers each, in one product."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ParameterList(torch.randn(16) / 4 for _ in range(1000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ torch.stack(list(self.rows)).T


def images(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(64, 1, 28, 28), torch.randint(10, (64,))


def vectors(width: int) -> Callable[[int], tuple[torch.Tensor, torch.Tensor]]:
    return lambda rank: (torch.randn(32, width), torch.randint(10, (32,)))


def tokens(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(8192, (4, 64)), torch.randint(8192, (256,))


WORKLOADS = [
    Workload("ConvNet", ConvNet, images, F.nll_loss),
    Workload("MLP, 2 M", mlp, vectors(784), F.cross_entropy),
    Workload("200 small layers", SmallLayers, vectors(64), F.cross_entropy),
    Workload("transformer, 9 M", Transformer, tokens, F.cross_entropy),
    Workload("1,000 tiny parameters", TinyParameters, vectors(16), F.cross_entropy),
]
BY_NAME = {workload.name: workload for workload in WORKLOADS}


def spread(values: Sequence[float], digits: int = 2) -> str:
    """The median and the quartiles."""
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{statistics.median(values):.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"
