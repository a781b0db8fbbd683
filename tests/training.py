"""Steps of an optimizer, as most tests take them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from torch import nn

Batch = TypeVar("Batch")


def mean_of_squares(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return the mean of the squares of what ``model`` makes of ``x``."""
    return model(x).square().mean()


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[Batch],
    loss_of: Callable[[nn.Module, Batch], torch.Tensor] = mean_of_squares,
) -> None:
    """Take a step with each of the batches, and leave no gradients."""
    for batch in batches:
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
