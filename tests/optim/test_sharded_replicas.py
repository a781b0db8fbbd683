"""Sharded optimizers of modules that have replicas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import lockstep
from tests.nn.models import Digits
from tests.optim.programs import adamw, check_same_bits


@pytest.mark.parametrize("size", [1, 2])
def test_replicas_of_each_rank_have_the_same_bits(size: int) -> None:
    def program(model: nn.Module, shard: Any, rank: int) -> list[float]:
        optimizer = shard(adamw(model.parameters()))
        replicas = lockstep.DataParallel(model, ["cpu", "cpu"])
        outputs = []
        for step in range(4):
            x = torch.randn(5, *Digits.sample, generator=torch.Generator().manual_seed(rank + step))
            loss = replicas(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            for parameter in model.parameters():
                parameter.data.mul_(0.9)  # torch counts no such write
            outputs.append(loss.item())
        return outputs

    check_same_bits(program, size=size, backend="shm")


class Scaled(nn.Module):
    """An embedding whose rows are scaled in place when they are looked up."""

    sample = (3,)

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4, max_norm=0.5)
        self.linear = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.embedding((10 * x).long()))


def test_rows_that_replicas_scale_have_the_same_bits() -> None:
    def program(model: nn.Module, shard: Any, rank: int) -> list[float]:
        optimizer = shard(adamw(model.parameters()))
        replicas = lockstep.DataParallel(model, ["cpu", "cpu"])
        outputs = []
        for step in range(3):
            x = torch.rand(5, *model.sample, generator=torch.Generator().manual_seed(step))
            loss = replicas(x).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            outputs.append(loss.item())
        return outputs

    check_same_bits(program, Scaled, size=1, backend="shm")
