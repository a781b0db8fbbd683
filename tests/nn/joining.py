"""Loops of different lengths on each rank, and what they do by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import lockstep
from tests.nn.parallel import net

OurDDP = lockstep.DistributedDataParallel


def launch(body: Callable[[lockstep.World], Any], world_size: int = 2) -> list[Any]:
    return lockstep.launch(body, world_size, ranks="threads")


def batches(lengths: Sequence[int], rows: int = 4) -> list[list[torch.Tensor]]:
    """Each rank's batches, the same every time."""
    generator = torch.Generator().manual_seed(5)
    return [
        [torch.randn(rows, 4, generator=generator, dtype=torch.float64) for _ in range(length)]
        for length in lengths
    ]


def steps_of(lengths: Sequence[int]) -> list[list[torch.Tensor]]:
    """For each step the batches of those ranks that still have one."""
    everyones = batches(lengths)
    return [[each[step] for each in everyones if step < len(each)] for step in range(max(lengths))]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def by_hand(
    lengths: Sequence[int],
    initial: bool = True,
    optimizer_of: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
) -> list[torch.Tensor]:
    """The parameters after the same steps in one process."""
    model = net()
    optimizer = optimizer_of(model)
    for parts in steps_of(lengths):
        optimizer.zero_grad()
        for part in parts:
            (model(part).square().mean() / (len(lengths) if initial else len(parts))).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def assert_all_are(results: Sequence[Sequence[torch.Tensor]], expected: Any) -> None:
    for result in results:
        assert all(map(torch.equal, result, results[0]))
        torch.testing.assert_close(list(result), list(expected), rtol=1e-12, atol=1e-12)
