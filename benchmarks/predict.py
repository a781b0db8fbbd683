"""Steps on 4 and 8 ranks as `lockstep report` predicts them from a trace of 2, and as they are.

    python -m benchmarks.predict [--steps 24] [--json FILE]

So that two cores do for eight ranks, which are threads, computing is sleeping: each layer's forward
and backward sleep for a time that differs by rank and step. The link is imitated as well: transfers
follow one another, start when the last rank has launched them, and take as long as on a
ring or a tree of the ranks, with a latency and a bandwidth that the prediction isn't told.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn

import lockstep
from lockstep.observe.analysis import step_times
from lockstep.observe.predict import predict
from lockstep.observe.trace_files import read_folder

# Small, so that their memory costs nothing; the links are as slow.
SIZES_KIB = (16, 64, 128, 32, 64, 96)


class Case(NamedTuple):
    """What the ranks compute, and over which link they send."""

    name: str
    forward: float  # seconds a layer
    backward: float
    spread: float  # of both, as a part of them: evenly distributed around their means
    latency: float  # of the link, seconds
    bandwidth: float  # bytes a second


CASES = [
    Case("transfers are hidden", 0.012, 0.030, 0.2, 0.001, 2e7),
    Case("the link is slower than the backward", 0.012, 0.018, 0.2, 0.001, 4e6),
    Case("latency above all", 0.012, 0.024, 0.2, 0.003, 1e8),
    Case("ranks differ much", 0.012, 0.030, 0.9, 0.001, 2e7),
]


class Link:
    """The link of all ranks, which are threads: what was launched on it, and when it is there."""

    def __init__(self, case: Case, size: int) -> None:
        self._case, self._size = case, size
        self._changed = threading.Condition()
        self._launches: dict[int, list[float]] = defaultdict(list)
        self._ends: list[float] = []

    def launch(self, number: int, num_bytes: int) -> None:
        with self._changed:
            launches = self._launches[number]
            launches.append(time.perf_counter())
            if len(launches) == self._size:
                start = max([*launches, *self._ends[-1:]])
                self._ends.append(start + self._seconds(num_bytes))
                del self._launches[number]
                self._changed.notify_all()

    def _seconds(self, num_bytes: int) -> float:
        _, _, _, _, latency, bandwidth = self._case
        ring = 2 * (self._size - 1) * (latency + num_bytes / self._size / bandwidth)
        tree = 2 * (self._size - 1).bit_length() * (latency + num_bytes / bandwidth)
        return min(ring, tree)

    def wait(self, number: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: len(self._ends) > number)
            left = self._ends[number] - time.perf_counter()
        if left > 0:
            time.sleep(left)


class SlowWork:
    """A transfer that is done when the link has carried it."""

    def __init__(self, link: Link, number: int) -> None:
        self._link, self._number = link, number

    def wait(self) -> bool:
        self._link.wait(self._number)
        return True


class SlowGroup:
    """A process group that sums nothing, but takes as long as the link does."""

    def __init__(self, group: dist.ProcessGroup, link: Link) -> None:
        self._group, self._link, self._num_launched = group, link, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def allreduce(self, tensors: list[torch.Tensor], _: object) -> SlowWork:
        number = self._num_launched
        self._num_launched += 1
        self._link.launch(number, sum(t.numel() * t.element_size() for t in tensors))
        return SlowWork(self._link, number)


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, times: Any) -> torch.Tensor:
        ctx.times, ctx.shape = times, weight.shape
        time.sleep(times[0]())
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        time.sleep(ctx.times[1]())
        return grads[0], torch.zeros(ctx.shape), None


class SleepingLayer(nn.Module):
    """A parameter of so many KiB, a forward and a backward that only take time."""

    def __init__(self, kib: int, times: Any) -> None:
        super().__init__()
        self.weight, self.times = nn.Parameter(torch.zeros(kib * 256)), times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Sleep.apply(x, self.weight, self.times)  # type: ignore[no-any-return]


def train(world: lockstep.World, folder: str, case: Case, link: Link, steps: int) -> None:
    drawn = random.Random(world.rank)

    def around(mean: float) -> Any:
        return lambda: mean * (1 + case.spread * drawn.uniform(-1, 1))

    times = around(case.forward), around(case.backward)
    assert world.process_group is not None
    group: Any = SlowGroup(world.process_group, link)
    model = lockstep.parallelize(
        nn.Sequential(*(SleepingLayer(kib, times) for kib in SIZES_KIB)),
        process_group=group,
        bucket_cap_mb=0.001,  # a bucket for each layer
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with lockstep.trace(folder):
        for _ in range(steps):
            model(torch.ones(1, requires_grad=True)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    table = Table(
        "case", "ranks", "predicted", "measured", "predicted / measured", title="ms a step"
    )
    results = []
    for case in CASES:
        predicted: dict[int, float] = {}
        for num_ranks in (2, 4, 8):
            with tempfile.TemporaryDirectory() as folder:
                given = folder, case, Link(case, num_ranks), args.steps
                lockstep.launch(train, num_ranks, given, ranks="threads")
                ranks = read_folder(Path(folder))
            steps = step_times(ranks)[3:]  # the first ones arrange the buckets
            if not predicted:
                found = predict(ranks, steps)
                assert found is not None
                predicted = {row.num_ranks: row.seconds for row in found.rows}
            lengths = [max(each.total for each in together) / 1e9 for together in steps]
            measured = statistics.median(lengths)
            ratio = predicted[num_ranks] / measured
            results.append([case.name, num_ranks, predicted[num_ranks], measured])
            times = f"{predicted[num_ranks] * 1e3:.1f}", f"{measured * 1e3:.1f}"
            table.add_row(case.name, str(num_ranks), *times, f"{ratio:.3f}")
    Console(width=100).print(table)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
