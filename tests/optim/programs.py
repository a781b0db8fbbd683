"""Programs that train a model, and whether a sharded optimizer leaves the same bits."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

import lockstep
from tests.nn.models import Digits
from tests.ranks import run_ranks
from tests.training import mean_of_squares, train

BACKENDS = pytest.mark.parametrize("backend", ["threads", "shm"])


def adamw(parameters: Any) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def samples(model: nn.Module, rank: int, steps: int, first: int = 0) -> Iterator[torch.Tensor]:
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(rank + 10 * step)
        yield torch.randn(2, *model.sample, generator=generator).to(next(model.parameters()).dtype)


def losses(model: nn.Module, rank: int, steps: int, first: int = 0) -> Iterator[torch.Tensor]:
    return (mean_of_squares(model, x) for x in samples(model, rank, steps, first))


# A program trains a model on one rank: with the optimizer that `shard` returns of its own.
Program = Callable[[nn.Module, Callable[[Optimizer], Optimizer], int], object]


def check_same_bits(
    program: Program,
    kind: type[nn.Module] = Digits,
    size: int = 2,
    backend: str = "threads",
    **options: bool,
) -> None:
    """Fail unless the program leaves the same parameters and returns the same if it is sharded."""
    torch.manual_seed(0)
    first = kind()

    def body(rank: int, group: dist.ProcessGroup) -> None:
        results = []
        for shard in (lambda optimizer: optimizer), partial(lockstep.shard_optimizer, **options):
            model = lockstep.parallelize(copy.deepcopy(first), process_group=group)
            results.append((program(model, shard, rank), model))
        (expected, plain), (found, sharded) = results
        assert found == expected
        for (name, a), b in zip(plain.named_parameters(), sharded.parameters(), strict=True):
            assert torch.equal(a, b), name

    run_ranks(size, body, backend=backend)


def take_steps(
    model: nn.Module, optimizer: Optimizer, rank: int, steps: int = 3, first: int = 0
) -> None:
    train(model, optimizer, samples(model, rank, steps, first))


def sharded(group: dist.ProcessGroup, first: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = lockstep.parallelize(copy.deepcopy(first), process_group=group)
    return model, lockstep.shard_optimizer(adamw(model.parameters()))


def overlapped(
    group: dist.ProcessGroup, first: nn.Module, make: Any = adamw
) -> tuple[nn.Module, Any]:
    model = lockstep.parallelize(copy.deepcopy(first), process_group=group)
    return model, lockstep.shard_optimizer(make(model.parameters()), overlap=True)


def trained(
    group: dist.ProcessGroup, first: nn.Module, make: Any, *, sharded: bool, steps: int = 6
) -> tuple[nn.Module, Optimizer]:
    model = lockstep.parallelize(copy.deepcopy(first), process_group=group)
    optimizer = make(model.parameters())
    if sharded:
        assert lockstep.shard_optimizer(optimizer) is optimizer
    take_steps(model, optimizer, group.rank(), steps)
    return model, optimizer
