"""How often the host waits for the device in a step: not oftener than with torch's wrapper.

But for a few of the first steps, in which lockstep looks at gradients and at the ranks' samples.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lockstep
from tests.simulated import control
from tests.simulated.batch_norm import with_torchs_batch_norm

pytestmark = pytest.mark.forks

# It looks at ranks in steps 1, 2, 4, 8 and 16.
FIRST_STEPS = 17
NUM_STEPS = 3


class Unused(nn.Module):
    """A model of which a part is not used: by any rank, or by one of them."""

    def __init__(self, rank: int = -1) -> None:
        super().__init__()
        self.first, self.second, self.rank = nn.Linear(8, 8), nn.Linear(8, 8), rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)) if self.rank == 1 else self.first(x)


def plain(rank: int) -> nn.Module:
    # Gradients of several times what a CPU takes the norm of at once.
    return nn.Sequential(nn.Linear(8, 400), nn.ReLU(), nn.Linear(400, 400), nn.Linear(400, 3))


def with_norms(rank: int) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.BatchNorm1d(8))


def unused(rank: int) -> nn.Module:
    return Unused()


def unused_on_a_rank(rank: int) -> nn.Module:
    return Unused(rank)


def synchronised(rank: int) -> nn.Module:
    return lockstep.SyncBatchNorm.convert_sync_batchnorm(with_norms(rank))


def synchronised_by_torch(rank: int) -> nn.Module:
    return nn.SyncBatchNorm.convert_sync_batchnorm(with_norms(rank))


def parallelized(model: nn.Module, optimizer: Any) -> tuple:
    return lockstep.parallelize(model), optimizer


def with_means_of_buffers(model: nn.Module, optimizer: Any) -> tuple:
    return lockstep.parallelize(model, broadcast_buffers={"*": "mean"}), optimizer


def wrapped(model: nn.Module, optimizer: Any) -> tuple:
    return lockstep.DistributedDataParallel(model), optimizer


def of_torch(model: nn.Module, optimizer: Any) -> tuple:
    return nn.parallel.DistributedDataParallel(model), optimizer


def of_torch_with_unused(model: nn.Module, optimizer: Any) -> tuple:
    return nn.parallel.DistributedDataParallel(model, find_unused_parameters=True), optimizer


def sharded(model: nn.Module, optimizer: Any) -> tuple:
    return lockstep.parallelize(model), lockstep.shard_optimizer(optimizer)


def overlapped(model: nn.Module, optimizer: Any) -> tuple:
    return lockstep.parallelize(model), lockstep.shard_optimizer(optimizer, overlap=True)


Step = Callable[[nn.Module, Any, torch.Tensor], None]


def step(model: nn.Module, optimizer: Any, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def of_one_sample(model: nn.Module, optimizer: Any, x: torch.Tensor) -> None:
    step(model, optimizer, x[:1])


def clipped(model: nn.Module, optimizer: Any, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    lockstep.clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()


def clipped_by_torch(model: nn.Module, optimizer: Any, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()


def of_a_mean(model: nn.Module, optimizer: Any, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    lockstep.mean(model(x).square().mean(1)).backward()
    optimizer.step()


def of_a_weighted_mean(model: nn.Module, optimizer: Any, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    lockstep.mean(model(x).square().mean(), weight=len(x)).backward()
    optimizer.step()


def of_weights(model: nn.Module, optimizer: Any, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    lockstep.mean(model(x).square().mean(1), weight=torch.arange(len(x))).backward()
    optimizer.step()


def accumulated(model: nn.Module, optimizer: Any, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    first, last = x.chunk(2)
    with lockstep.accumulate(model):
        lockstep.mean(model(first).square().mean(1)).backward()
    lockstep.mean(model(last).square().mean(1)).backward()
    optimizer.step()


def averaged(model: nn.Module, optimizer: Any, x: torch.Tensor) -> None:
    step(model, optimizer, x)
    optimizer.zero_grad()
    model(x).square().mean().backward()
    lockstep.average_gradients(model, weight=len(x))


def in_shards(model: nn.Module, optimizer: Any, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    for part in lockstep.shards(model, x, 4):
        lockstep.mean(model(part).square().mean(1)).backward()
    optimizer.step()


def in_shards_without_a_mean(model: nn.Module, optimizer: Any, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    for part in lockstep.shards(model, x, 4):
        model(part).square().mean().backward()
    optimizer.step()


def in_weighted_shards(model: nn.Module, optimizer: Any, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    for part in lockstep.shards(model, torch.cat([x, x]), 4):
        weight = torch.arange(1, 1 + len(part), device=x.device)
        lockstep.mean(model(part).square().mean(1), weight=weight).backward()
    optimizer.step()


def alone(model: nn.Module, optimizer: Any) -> tuple:
    return model, optimizer


def waits(world: lockstep.World, make: Callable, wrap: Callable, step: Step) -> Counter[str]:
    """The waits in some steps, after the first ones."""
    torch.manual_seed(2)
    model = make(world.rank).to(world.device)
    model, optimizer = wrap(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    torch.manual_seed(world.rank)
    x = torch.randn(4, 8, device=world.device)
    with with_torchs_batch_norm():
        for _ in range(FIRST_STEPS):
            step(model, optimizer, x)
        torch.accelerator.synchronize()
        with control.counted_host_waits() as found:
            for _ in range(NUM_STEPS):
                step(model, optimizer, x)
            return Counter(found)


# What is trained, in what, and how; and the waits of the host in a step of lockstep's, and of
# torch's. Torch's SyncBatchNorm takes three tensors by a mask in each layer, and each counts twice.
CASES: dict[str, tuple[tuple, int, tuple, int]] = {
    "parallelize": ((plain, parallelized, step), 0, (plain, of_torch, step), 0),
    "DistributedDataParallel": ((plain, wrapped, step), 0, (plain, of_torch, step), 0),
    "sharded": ((plain, sharded, step), 0, (plain, of_torch, step), 0),
    "overlapped": ((plain, overlapped, step), 0, (plain, of_torch, step), 0),
    "clip_grad_norm_": ((plain, parallelized, clipped), 0, (plain, of_torch, clipped_by_torch), 0),
    "clip_grad_norm_, overlapped": (
        *((plain, overlapped, clipped), 0),
        *((plain, of_torch, clipped_by_torch), 0),
    ),
    "unused by all": ((unused, wrapped, step), 1, (unused, of_torch_with_unused, step), 1),
    "unused by one": (
        *((unused_on_a_rank, wrapped, step), 1),
        *((unused_on_a_rank, of_torch_with_unused, step), 1),
    ),
    "buffers": ((with_norms, parallelized, step), 0, (with_norms, of_torch, step), 0),
    "means of buffers": ((with_norms, with_means_of_buffers, step), 0, (), 0),
    "SyncBatchNorm": (
        (synchronised, wrapped, step),
        0,
        (synchronised_by_torch, of_torch, step),
        12,
    ),
    "SyncBatchNorm, one sample": (
        *((synchronised, wrapped, of_one_sample), 0),
        *((synchronised_by_torch, of_torch, of_one_sample), 12),
    ),
    "mean": ((plain, parallelized, of_a_mean), 0, (), 0),
    "mean, weighted": ((plain, parallelized, of_a_weighted_mean), 0, (), 0),
    "mean of weights": ((plain, parallelized, of_weights), 0, (), 0),
    "accumulate": ((plain, parallelized, accumulated), 0, (), 0),
    # The host waits once at the end: for the loss, weights and whether buffers have changed.
    "shards": ((plain, parallelized, in_shards), 1, (), 0),
    "shards, no mean": ((plain, parallelized, in_shards_without_a_mean), 0, (), 0),
    "shards, weighted, with buffers": ((with_norms, parallelized, in_weighted_shards), 1, (), 0),
    "average_gradients": ((plain, alone, averaged), 0, (), 0),
}


def waits_of_all(world: lockstep.World) -> list[list[Counter[str]]]:
    """Those of each case, lockstep's and torch's."""
    # On "lazy" streams, what a rank has launched runs only once that rank waits for it. A rank that
    # waits over Gloo, on the host, would keep the other, which waits for its part, for ever.
    control.set_delay("0,0")
    found = []
    for ours, _, torchs, _ in CASES.values():
        found.append([])
        for case in filter(None, (ours, torchs)):
            found[-1].append(waits(world, *case))
            gc.collect()  # the models, which could share a backward with the next one
    return found


@pytest.fixture(scope="module")
def by_rank() -> list[list[list[Counter[str]]]]:
    return lockstep.launch(waits_of_all, 2)


@pytest.mark.parametrize("name", CASES)
def test_the_host_waits_not_oftener_than_torchs(name: str, by_rank: list) -> None:
    found = [rank[[*CASES].index(name)] for rank in by_rank]
    print(*found, sep="\n")  # the lines that wait, where the test fails
    most = [max(each.total() for each in of_ranks) for of_ranks in zip(*found, strict=True)]
    expected = [number * NUM_STEPS for number in CASES[name][1::2]]
    assert most == expected[: len(most)]
