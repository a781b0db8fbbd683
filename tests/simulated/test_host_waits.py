"""How often the host waits for the device in a step: never, as with torch's wrapper.

But for a few of the first steps, in which lockstep looks at gradients and at the ranks' samples.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import nn

import lockstep
from tests.simulated import cuda

pytestmark = pytest.mark.forks

# It looks at ranks in steps 1, 2, 4, 8 and 16.
FIRST_STEPS = 17


def steps(world: lockstep.World, wrap: Callable) -> Counter[str]:
    """The waits in three steps, after the first ones."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)).to(world.device)
    model, optimizer = wrap(model)
    torch.manual_seed(world.rank)
    x = torch.randn(4, 8, device=world.device)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    for _ in range(FIRST_STEPS):
        step()
    torch.cuda.synchronize()
    with cuda.counted_host_waits() as waits:
        for _ in range(3):
            step()
    return waits


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def parallelized(model: nn.Module) -> tuple:
    return lockstep.parallelize(model), sgd(model)


def wrapped(model: nn.Module) -> tuple:
    return lockstep.DistributedDataParallel(model), sgd(model)


def of_torch(model: nn.Module) -> tuple:
    return nn.parallel.DistributedDataParallel(model), sgd(model)


def sharded(model: nn.Module) -> tuple:
    return lockstep.parallelize(model), lockstep.shard_optimizer(sgd(model))


def sharded_with_overlap(model: nn.Module) -> tuple:
    model = lockstep.parallelize(model)
    return model, lockstep.shard_optimizer(sgd(model), overlap=True)


@pytest.mark.parametrize("wrap", [parallelized, wrapped, of_torch, sharded, sharded_with_overlap])
def test_the_host_waits_in_no_step(wrap: Callable) -> None:
    for waits in lockstep.launch(steps, 2, (wrap,)):
        assert not waits
