"""Runs to report on: traced ones with a slow rank, and spans made up."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils.data import DataLoader, Dataset

import lockstep
from lockstep.observe.records import BucketTimes, RankSpans, Span

MS = 1_000_000


class Slow:
    """Sleeps where it is told to, on one rank."""

    def __init__(self, place: str, rank: int, seconds: float) -> None:
        self.place, self.rank, self.seconds = place, rank, seconds

    def at(self, place: str, world: lockstep.World) -> None:
        if (place, world.rank) == (self.place, self.rank):
            time.sleep(self.seconds)


class Samples(Dataset[torch.Tensor]):
    def __init__(self, slow: Slow, world: lockstep.World) -> None:
        self.slow, self.world = slow, world

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        if index % 4 == 0:
            self.slow.at("data", self.world)
        return torch.full((8,), float(index))


class Net(nn.Module):
    def __init__(self, slow: Slow, world: lockstep.World) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.slow, self.world = slow, world

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.slow.at("forward", self.world)
        hidden = self.first(x)
        hidden.register_hook(lambda _: self.slow.at("backward", self.world))
        return self.second(hidden)  # type: ignore[no-any-return]


def train_slowly(world: lockstep.World, folder: Path, slow: Slow) -> None:
    def hook(state: object, bucket: Any) -> Any:
        slow.at("collectives", world)
        return allreduce_hook(world.process_group, bucket)  # type: ignore[arg-type]

    net = Net(slow, world)
    model = lockstep.DistributedDataParallel(net, process_group=world.process_group)
    if slow.place == "collectives":
        model.register_comm_hook(None, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    # torch's, as ranks that are threads take turns in reading with ours.
    loader = DataLoader(Samples(slow, world), 4)
    with lockstep.trace(folder):
        for x in loader:
            lockstep.mean(model(x).square(), process_group=world.process_group).backward()
            optimizer.step()
            optimizer.zero_grad()


def rank_of(rank: int, comes: list[int], leaves: list[int], *, data: int = 1) -> RankSpans:
    """A rank whose steps have ``data`` ms of data, and one wait; times in ms."""
    spans, now = [], 0
    for step, (start, stop) in enumerate(zip(comes, leaves, strict=True)):
        words = [("data", now, now + data), ("forward", now + data, now + data + 1)]
        words += [("backward", now + data + 1, stop), ("wait", start, stop)]
        words += [("optimizer", stop, stop + 1)]
        spans += [
            Span(name, begin * MS, end * MS, step, 0, "all_reduce" * (name == "wait"), 100)
            for name, begin, end in words
        ]
        now = stop + 1
    times = enumerate(zip(comes, leaves, strict=True))
    buckets = [BucketTimes((c - 1) * MS, (c - 1) * MS, s * MS, step, 0) for step, (c, s) in times]
    return RankSpans(rank, {"host": "h"}, spans, buckets, [], {0: {"bytes": 100}})


def two_ranks() -> list[RankSpans]:
    """Steps of 11 and 10 ms; rank 1 comes 4 ms later."""
    return [rank_of(0, [5, 15], [10, 20]), rank_of(1, [9, 19], [10, 20])]
