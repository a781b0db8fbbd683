"""Milliseconds a training step in one process: the bare model, and DataParallel on its cores.

    python -m benchmarks.data_parallel [--rounds 7]

The bare model computes with one intra-op thread for each core. DataParallel splits the same batch
over as many replicas, in threads. The two take turns, each in a new process in every round: the
layout of a process's memory makes a difference of up to a third.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import lockstep
from benchmarks.models import BY_NAME, WORKLOADS, Workload, spread

CONTENDERS = ["bare", "threads"]
# The batch of each model is that of this number of ranks; by default two.
NUM_PARTS = {"200 small layers": 1}
SECONDS, WARM_UP_STEPS = 1.0, 15


def step_seconds(contender: str, workload: Workload) -> float:
    """The median time of a contender's step, in this process."""
    num_parts = NUM_PARTS.get(workload.name, 2)
    parts = [workload.batch(number) for number in range(num_parts)]
    inputs, targets = (torch.cat(column) for column in zip(*parts, strict=True))
    module = workload.build()
    model = module
    if contender != "bare":
        devices = ["cpu"] * torch.get_num_threads()
        model = lockstep.DataParallel(module, devices)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)

    def step() -> float:
        began = time.perf_counter()
        optimizer.zero_grad()
        workload.loss(model(inputs), targets).backward()
        optimizer.step()
        return time.perf_counter() - began

    for _ in range(WARM_UP_STEPS):
        step()
    taken: list[float] = []
    while sum(taken) < SECONDS or len(taken) < WARM_UP_STEPS:
        taken.append(step())
    return statistics.median(taken)


def overhead_seconds() -> float:
    """The additional time of a forward through DataParallel on one device."""
    module = torch.nn.Identity()
    model, x = lockstep.DataParallel(module, ["cpu"]), torch.ones(1)

    def call(target: torch.nn.Module) -> float:
        began = time.perf_counter()
        for _ in range(1000):
            target(x)
        return (time.perf_counter() - began) / 1000

    return statistics.median(call(model) - call(module) for _ in range(15))


def measured(contender: str, workload: Workload) -> float:
    """The same in a new process."""
    command = [sys.executable, "-m", "benchmarks.data_parallel", "--measure", contender]
    done = subprocess.run([*command, workload.name], check=True, stdout=subprocess.PIPE, text=True)
    return float(json.loads(done.stdout))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        contender, name = arguments.measure
        print(json.dumps(step_seconds(contender, BY_NAME[name])))
        return
    table = Table("model", *CONTENDERS, "bare / threads")
    with Progress(transient=True) as progress:
        task = progress.add_task("steps", total=len(WORKLOADS) * arguments.rounds)
        for workload in WORKLOADS:
            rounds = []
            for _ in range(arguments.rounds):
                rounds.append([measured(contender, workload) for contender in CONTENDERS])
                progress.advance(task)
            columns = [[1e3 * seconds for seconds in times] for times in zip(*rounds, strict=True)]
            ratios = [bare / threads for bare, threads in rounds]
            table.add_row(workload.name, *map(spread, columns), spread(ratios))
    Console(width=150).print(table)
    print(f"A forward through DataParallel on one device: {1e6 * overhead_seconds():.1f} us more.")


if __name__ == "__main__":
    main()
