"""Training steps and memory with sharded optimizers: ours, torch's, and no communication.

    lockstep run -n 2 -m benchmarks.optimizers [--rounds 15] [--json FILE] [--gloo]
    python -m benchmarks.optimizers --memory 4

Milliseconds a step, for SGD with momentum, AdamW, and AdamW with ``fused=True`` on all sides, as in
``benchmarks.steps``: the contenders take turns, and the time of a round is that of the slowest
rank. torch's DDP, with and without its ZeroRedundancyOptimizer, and FSDP2 are over Gloo; with
``--gloo`` ours too, with and without ``overlap=True``.

``--memory 4``: what all ranks together hold for a model with AdamW after some steps, in MB, beyond
what they held before: the sum of their proportional set sizes, in which a page that several
processes share counts once. The contenders have processes of their own, one after another.
"""

from __future__ import annotations

import argparse
import copy
import functools
import gc
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import Optimizer

import lockstep
from benchmarks.models import BY_NAME, WORKLOADS, spread
from benchmarks.steps import Wrap, measure, ratios, trained_as

BARE, OURS, SHARDED = "no communication", "parallelize", "shard_optimizer"
DDP, ZERO, FSDP2 = "DDP", "DDP + ZeRO", "FSDP2"
OVERLAPPED = "shard_optimizer, overlap"
NUM_STEPS = 5


class Kind(NamedTuple):
    """A class of optimizers, and its options."""

    cls: type[Optimizer]
    options: dict[str, Any]

    def make(self, model: nn.Module) -> Optimizer:
        """The optimizer of a model."""
        return self.cls(model.parameters(), **self.options)


ADAMW = Kind(torch.optim.AdamW, {"lr": 1e-4})
KINDS = {
    "SGD with momentum": Kind(torch.optim.SGD, {"lr": 0.01, "momentum": 0.9}),
    "AdamW": ADAMW,
    "AdamW, fused": Kind(torch.optim.AdamW, {"lr": 1e-4, "fused": True}),
}


def contenders(kind: Kind, gloo: dist.ProcessGroup, *, over_gloo: bool = False) -> dict[str, Wrap]:
    """The contenders. Every rank must call it, as it creates process groups."""
    make = kind.make
    # Each model has a group of its own: else backwards are asked whether they reach the others too.
    alone, apart, beside = (
        functools.partial(lockstep.parallelize, process_group=dist.new_group(backend=backend))
        for backend in ("gloo" if over_gloo else "shm",) * 3
    )

    def shard(model: nn.Module, *, overlap: bool = False) -> Optimizer:
        return lockstep.shard_optimizer(make(model), overlap=overlap)

    ddp = functools.partial(
        nn.parallel.DistributedDataParallel, process_group=gloo, gradient_as_bucket_view=True
    )

    overlap = functools.partial(shard, overlap=True)

    def zero(model: nn.Module) -> Optimizer:
        return ZeroRedundancyOptimizer(model.parameters(), kind.cls, gloo, **kind.options)

    def fsdp2(model: nn.Module) -> nn.Module:
        mesh = DeviceMesh.from_group(gloo, "cpu")
        return fully_shard(model, mesh=mesh)

    return {
        BARE: trained_as(lambda model: model, make),
        OURS: trained_as(alone, make),
        SHARDED: trained_as(apart, shard),
        **({OVERLAPPED: trained_as(beside, overlap)} if over_gloo else {}),
        DDP: trained_as(ddp, make),
        ZERO: trained_as(ddp, zero),
        FSDP2: trained_as(fsdp2, make),
    }


def time_steps(
    world: lockstep.World, rounds: int, json_file: Path | None, *, over_gloo: bool
) -> None:
    gloo = dist.new_group(backend="gloo")
    found = {}
    for title, kind in KINDS.items():
        wraps = contenders(kind, gloo, over_gloo=over_gloo)
        ours = [name for name in (OURS, SHARDED, OVERLAPPED) if name in wraps]
        table = Table(
            "model",
            *wraps,
            *(f"{name} / none" for name in ours),
            *(f"{name} / {ours[-1]}" for name in (ZERO, FSDP2)),
            title=f"{title}: ms a step, {world.world_size} ranks, median (quartiles) of {rounds}",
        )
        for workload in WORKLOADS:
            times = measure(workload, wraps, rounds, world.rank)
            found[f"{title}: {workload.name}"] = times
            table.add_row(
                workload.name,
                *(spread(values, 2) for values in times.values()),
                *(spread(ratios(times[name], times[BARE]), 3) for name in ours),
                *(spread(ratios(times[name], times[ours[-1]]), 3) for name in (ZERO, FSDP2)),
            )
        if world.rank == 0:
            Console(width=220).print(table)
    if world.rank == 0 and json_file is not None:
        json_file.write_text(json.dumps(found, indent=1))


def held_mb() -> float:
    """The proportional set size of this process."""
    rollup = Path("/proc/self/smaps_rollup").read_text()
    found = re.search(r"^Pss: +(\d+) kB", rollup, re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024 / 1e6


def measure_memory(contender: str, name: str) -> None:
    """Train, and let rank 0 print what all ranks hold more than before."""
    world = lockstep.init(backend="shm")
    gloo = dist.new_group(backend="gloo")
    workload = BY_NAME[name]
    like = workload.build()
    # Everything that comes with a first step is there before.
    optimizer = ADAMW.make(like)
    inputs, targets = workload.batch(world.rank)
    workload.loss(like(inputs), targets).backward()
    optimizer.step()
    del like, optimizer
    before = total(held_mb)
    model, optimizer, _ = contenders(ADAMW, gloo)[contender](copy.deepcopy(workload.build()))
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        workload.loss(model(inputs), targets).backward()
        optimizer.step()
    optimizer.zero_grad()
    held = total(held_mb) - before
    if world.rank == 0:
        print(json.dumps(held))


def total(figure: Callable[[], float]) -> float:
    """The sum over the ranks, measured when all have come."""
    gc.collect()
    dist.barrier()
    value = torch.tensor(figure(), dtype=torch.float64)
    dist.all_reduce(value)
    return value.item()


def compare_memory(num_ranks: int) -> None:
    names = [BARE, OURS, SHARDED, DDP, ZERO, FSDP2]
    table = Table(
        "model", "parameters", *names, title=f"MB that {num_ranks} ranks hold together, AdamW"
    )
    for workload in WORKLOADS:
        parameters = sum(p.nbytes for p in workload.build().parameters()) / 1e6
        row = []
        for name in names:
            command = [
                *(sys.executable, "-m", "lockstep", "run", "-n", str(num_ranks)),
                *("-m", "benchmarks.optimizers", "--measure", name, workload.name),
            ]
            # A heap that gives back what isn't used any more, of every contender.
            heap = {"MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_MMAP_THRESHOLD_": "65536"}
            done = subprocess.run(
                command, check=True, capture_output=True, text=True, env={**os.environ, **heap}
            )
            row.append(json.loads(done.stdout.partition("[rank 0]")[2]))
        table.add_row(workload.name, f"{parameters:.1f}", *(f"{held:.1f}" for held in row))
    Console(width=140).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, help="write every round's figures to this file")
    parser.add_argument("--gloo", action="store_true", help="measure all over Gloo")
    parser.add_argument("--memory", type=int, metavar="RANKS", help="compare memory instead")
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        measure_memory(*args.measure)
    elif args.memory:
        compare_memory(args.memory)
    else:
        time_steps(lockstep.init(), args.rounds, args.json, over_gloo=args.gloo)


if __name__ == "__main__":
    main()
