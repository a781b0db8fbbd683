"""The part of the communication that a backward hides, on a slow link.

    lockstep run -n 2 -m benchmarks.overlap [--rounds 7]

The transformer's gradients are all-reduced over a process group that imitates a network: transfers
follow one another, take a time proportional to their bytes, and need no core. It sleeps that long,
and sums only the first number of each buffer, so that all ranks have to arrive. There are three
links, on which the transfers take half of the backward's time, the same time, and twice that.

The bound in the table is max(computing, communicating) + the last bucket's transfer. No reduction
is faster: no transfer starts before the first bucket is full, all transfers share one link, and the
last bucket is full when the backward ends. "forward" is the time that can hide no transfer.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import lockstep
from benchmarks.models import BY_NAME, spread
from benchmarks.steps import slowest


class SlowWork:
    """A transfer that ends when the link has carried it."""

    def __init__(self, work: dist.Work, arrives: float) -> None:
        self._work = work
        self._arrives = arrives

    def wait(self) -> bool:
        self._work.wait()
        time.sleep(max(0.0, self._arrives - time.perf_counter()))
        return True


class SlowLink:
    """A process group over a link with this bandwidth, in bytes per second."""

    def __init__(self, group: dist.ProcessGroup, bytes_a_second: float) -> None:
        self._group = group
        self._bytes_a_second = bytes_a_second
        self._is_free_at = 0.0
        self.transfers: list[float] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self._group, name)

    def allreduce(self, tensors: list[torch.Tensor], options: object) -> SlowWork:
        seconds = sum(t.numel() * t.element_size() for t in tensors) / self._bytes_a_second
        self._is_free_at = max(self._is_free_at, time.perf_counter()) + seconds
        self.transfers.append(seconds)
        firsts = [tensor[:1] for tensor in tensors]
        return SlowWork(self._group.allreduce(firsts, options), self._is_free_at)


def timed(call: Callable[[], None]) -> float:
    dist.barrier()
    began = time.perf_counter()
    call()
    return slowest(time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--bucket-cap-mb", type=float, default=4)
    args = parser.parse_args()
    world = lockstep.init()
    if world.process_group is None:
        raise SystemExit("Start it on several ranks: lockstep run -n 2 -m benchmarks.overlap")
    workload = BY_NAME["transformer, 9 M"]
    inputs, targets = workload.batch(world.rank)
    alone = workload.build()
    num_bytes = sum(p.numel() * p.element_size() for p in alone.parameters())

    def forward() -> torch.Tensor:
        return workload.loss(alone(inputs), targets)

    def step_of(model: torch.nn.Module) -> Callable[[], None]:
        def step() -> None:
            model.zero_grad()
            workload.loss(model(inputs), targets).backward()

        return step

    compute = [timed(step_of(alone)) for _ in range(args.rounds + 2)][2:]
    forwards = [timed(lambda: forward()) for _ in range(args.rounds)]
    backward = statistics.median(compute) - statistics.median(forwards)
    table = Table(
        "link, MB/s", "computing", "forward", "communicating", "last bucket", "bound", "step",
        "step / bound",
        title=f"ms, {world.world_size} ranks, {workload.name}, buckets of "
        f"{args.bucket_cap_mb:g} MiB: median (quartiles) of {args.rounds} rounds",
    )  # fmt: skip
    for factor in (0.5, 1.0, 2.0):
        link = SlowLink(world.process_group, num_bytes / (backward * factor))
        model = lockstep.parallelize(
            workload.build(), process_group=link, bucket_cap_mb=args.bucket_cap_mb
        )
        step, rows = step_of(model), []
        for number in range(args.rounds + 3):
            computing = timed(step_of(alone))
            link.transfers.clear()
            took = timed(step)
            bound = max(computing, sum(link.transfers)) + link.transfers[-1]
            if number >= 3:  # the first steps arrange the buckets
                rows.append((computing, bound, took, sum(link.transfers), link.transfers[-1]))
        computing_, bounds, tooks, communicating, last = map(list, zip(*rows, strict=True))
        table.add_row(
            f"{num_bytes / (backward * factor) / 1e6:.0f}",
            spread([value * 1000 for value in computing_], 1),
            spread([value * 1000 for value in forwards], 1),
            f"{statistics.median(communicating) * 1000:.1f}",
            f"{statistics.median(last) * 1000:.1f}",
            spread([value * 1000 for value in bounds], 1),
            spread([value * 1000 for value in tooks], 1),
            spread([a / b for a, b in zip(tooks, bounds, strict=True)], 3),
        )
    if world.rank == 0:
        Console(width=160).print(table)


if __name__ == "__main__":
    main()
