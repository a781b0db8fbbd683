"""Milliseconds a training step without and with lockstep.trace(), by turns, of one model.

    lockstep run -n 2 -m benchmarks.trace [--rounds 15] [--json FILE]

Off, what could be recorded costs a look at one variable; on, each span a line in a file.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import lockstep
from benchmarks.models import WORKLOADS, Workload, spread
from benchmarks.steps import SECONDS_PER_TURN, WARM_UP_STEPS, ratios, stepper, trained_as, turn

OFF, ON = "trace off", "trace on"


def measure(workload: Workload, rounds: int, rank: int, folder: Path) -> dict[str, list[float]]:
    torch.manual_seed(0)
    step = stepper(workload, trained_as(lockstep.parallelize)(workload.build()), rank)
    num_steps = max(2, round(SECONDS_PER_TURN * 1000 / turn(step, WARM_UP_STEPS)))
    times: dict[str, list[float]] = {OFF: [], ON: []}
    for number in range(rounds):
        for name in sorted(times, reverse=number % 2 > 0):
            if name == ON:
                with lockstep.trace(folder):
                    times[name].append(turn(step, num_steps))
            else:
                times[name].append(turn(step, num_steps))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, help="write every round's figures to this file")
    args = parser.parse_args()
    world = lockstep.init()
    title = f"ms a step, {world.world_size} ranks, median (quartiles) of {args.rounds} rounds"
    table = Table("model", OFF, ON, "on / off", title=title)
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for workload in WORKLOADS:
            # Each rank in a folder of its own: merging isn't what is measured.
            own = Path(folder) / str(world.rank)
            times = results[workload.name] = measure(workload, args.rounds, world.rank, own)
            ratio = spread(ratios(times[ON], times[OFF]), 3)
            table.add_row(workload.name, *(spread(each, 2) for each in times.values()), ratio)
    if world.rank == 0:
        Console(width=120).print(table)
        if args.json:
            args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
