"""Milliseconds a training step by what is noted of it, by turns, of one model.

    lockstep run -n 2 -m benchmarks.trace [--rounds 15] [--json FILE]

Nothing: what could be noted costs a look at two variables. The status is what ``lockstep run`` and
``lockstep status`` show: some numbers in shared memory. A trace is a line in a file for each span.
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
from lockstep import spans

NOTHING, STATUS, TRACE = "nothing", "status", "status and trace"


def measure(workload: Workload, rounds: int, rank: int, folder: Path) -> dict[str, list[float]]:
    torch.manual_seed(0)
    step = stepper(workload, trained_as(lockstep.parallelize)(workload.build()), rank)
    num_steps = max(2, round(SECONDS_PER_TURN * 1000 / turn(step, WARM_UP_STEPS)))
    times: dict[str, list[float]] = {NOTHING: [], STATUS: [], TRACE: []}
    status = spans.status
    for number in range(rounds):
        for name in sorted(times, reverse=number % 2 > 0):
            spans.status = None if name == NOTHING else status
            if name == TRACE:
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
    table = Table(
        "model", NOTHING, STATUS, TRACE, "status / nothing", "trace / nothing", title=title
    )
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for workload in WORKLOADS:
            # Each rank in a folder of its own: merging isn't what is measured.
            local = Path(folder) / str(world.rank)
            times = results[workload.name] = measure(workload, args.rounds, world.rank, local)
            by_name = [ratios(times[name], times[NOTHING]) for name in (STATUS, TRACE)]
            columns = [spread(each, 2) for each in times.values()]
            table.add_row(workload.name, *columns, *(spread(each, 3) for each in by_name))
    if world.rank == 0:
        Console(width=120).print(table)
        if args.json:
            args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
