"""The same small problem for every client: what to train, on what, and what to compare."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

import lockstep

# Of a process that is alone; torch's DDP over Gloo; ours over shared memory, in both forms.
Kind = Literal["alone", "torch", "wrapper", "in place"]
PARALLEL: tuple[Kind, ...] = ("torch", "wrapper", "in place")

NUM_SAMPLES, GLOBAL_BATCH = 48, 8


def place() -> tuple[int, int]:
    """This rank and the number of ranks, as whoever launched them says."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def make_group(kind: Kind) -> None:
    """What a client finds that doesn't make a process group by itself."""
    if kind == "torch":
        dist.init_process_group("gloo")
    elif kind != "alone":
        lockstep.init()
        assert dist.get_backend() == "shm"


def wrap(kind: Kind, module: nn.Module) -> nn.Module:
    if kind == "torch":
        return nn.parallel.DistributedDataParallel(module)
    if kind == "wrapper":
        return lockstep.DistributedDataParallel(module)
    return lockstep.parallelize(module) if kind == "in place" else module


class Net(nn.Module):
    """A small network; each rank begins with its own numbers, of which rank 0's count."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(place()[0])
        self.inner = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
        self.outer = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.inner(x))


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(NUM_SAMPLES, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(3, (NUM_SAMPLES,), generator=generator))


def loader(data: Dataset[Any]) -> DataLoader[Any]:
    """This rank's part of the global batches, which are the same for any number of ranks."""
    rank, size = place()
    sampler = DistributedSampler(data, size, rank, shuffle=False)
    return DataLoader(data, GLOBAL_BATCH // size, sampler=sampler)


def parameters_of(module: nn.Module) -> dict[str, torch.Tensor]:
    module = getattr(module, "module", module)
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def assert_ranks_as_alone(ranks: Sequence[Any], alone: Any, *, atol: float = 1e-11) -> None:
    """Ranks must hold the same bits, and those one process's numbers."""
    for other in ranks[1:]:
        torch.testing.assert_close(other, ranks[0], rtol=0, atol=0)
    torch.testing.assert_close(ranks[0], alone, rtol=1e-9, atol=atol)
