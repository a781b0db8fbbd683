"""Saves of a transformer with AdamW: ours, and torch.save by one rank.

    lockstep run -n 2 -m benchmarks.checkpoint [--rounds 15] [--folder DIR]

Milliseconds, as a program sees them: a save, the pause of one with ``async_=True``, a load, and
torch.save by rank 0 while the others wait, to the file of the round before and with an fsync too.
The contenders take turns; the time of a round is that of the slowest rank. The optimizer is sharded
where there are several ranks. torch.save waits for nothing to be on the disk; ours does.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import lockstep
from benchmarks.models import BY_NAME, spread

WORKLOAD = "transformer, 9 M"
NAMES = ["torch.save", "torch.save + fsync", "save", "async pause", "step", "load"]


def timed(call: Callable[[], Any]) -> float:
    """The seconds that the slowest rank takes, of ranks that begin together."""
    if dist.is_initialized():
        dist.barrier()
    start = time.perf_counter()
    call()
    seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--folder", type=Path, help="where to save; by default a new one here")
    args = parser.parse_args()
    world = lockstep.init()
    workload = BY_NAME[WORKLOAD]
    model = lockstep.parallelize(workload.build())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    if world.world_size > 1:
        lockstep.shard_optimizer(optimizer)
    inputs, targets = workload.batch(world.rank)

    def step() -> None:
        workload.loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    whole = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    folder = args.folder or Path(tempfile.gettempdir()) / "lockstep-benchmark"
    folder.mkdir(exist_ok=True)

    def torch_save(*, is_synced: bool) -> None:
        if world.rank == 0:
            with open(folder / "torch.pt", "wb") as file:
                torch.save(whole, file)
                if is_synced:
                    os.fsync(file.fileno())
        if dist.is_initialized():
            dist.barrier()

    things = {"model": model, "optimizer": optimizer}
    contenders = {
        NAMES[0]: lambda: torch_save(is_synced=False),
        NAMES[1]: lambda: torch_save(is_synced=True),
        NAMES[2]: lambda: lockstep.save(folder / "sync", **things),
        NAMES[3]: lambda: lockstep.save(folder / "async", async_=True, **things),
        NAMES[4]: step,
        NAMES[5]: lambda: lockstep.load(folder / "sync", **things),
    }
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(args.rounds + 2):
        for name, call in contenders.items():
            os.sync()
            seconds = timed(call)
            if number >= 2:
                times[name].append(seconds * 1000)
    if world.rank == 0:
        title = f"{WORKLOAD} with AdamW, {world.world_size} ranks: ms, median (quartiles)"
        table = Table(*times, *(f"save / {name}" for name in NAMES[:2]), title=title)
        ratios = [
            spread([a / b for a, b in zip(times[NAMES[2]], times[name], strict=True)], 2)
            for name in NAMES[:2]
        ]
        table.add_row(*(spread(values, 1) for values in times.values()), *ratios)
        Console(width=220).print(table)
    lockstep.load(folder / "async", **things)  # waits for the last one
    if world.rank == 0:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
