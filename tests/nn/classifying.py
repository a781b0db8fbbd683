"""A classifier and its samples, to take means of its losses."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn import functional as F

TOLERANCE = {"rtol": 1e-12, "atol": 1e-12}

with torch.random.fork_rng():
    torch.manual_seed(11)
    _CLASSIFIER = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def classifier() -> nn.Module:
    """The same one every time. (Ranks, as threads, share torch's seed.)"""
    return copy.deepcopy(_CLASSIFIER)


def samples(count: int = 12) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs, targets and weights."""
    generator = torch.Generator().manual_seed(13)
    x = torch.randn(count, 4, dtype=torch.float64, generator=generator)
    y = torch.randint(0, 3, (count,), generator=generator)
    return x, y, torch.rand(count, dtype=torch.float64, generator=generator)


def losses_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y, reduction="none")


def assert_gradients(model: nn.Module, oracle: nn.Module) -> None:
    for mine, theirs in zip(model.parameters(), oracle.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, **TOLERANCE)
