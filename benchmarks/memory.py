"""Peak memory of a rank: ours, torch's DDP with gradient_as_bucket_view, and no communication.

    python -m benchmarks.memory [--nprocs 2]

Each contender trains in processes of its own. Shown is how much the peak of a rank's resident
memory is above what it was before the model was built, in MB, of the rank that has more. Of shared
memory every rank counts what it has touched, its peers' included.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys

from rich.console import Console
from rich.table import Table

CONTENDERS = ["none", "lockstep, gloo", "torch DDP, gloo", "lockstep, shm"]


def resident_mb() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 1e6


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def measure(contender: str, name: str) -> None:
    """Train, in each rank's process, and let rank 0 print the larger peak."""
    import torch
    import torch.distributed as dist

    import lockstep
    from benchmarks.models import WORKLOADS

    _ = lockstep.parallelize  # imported when it is first used
    backend = "shm" if contender.endswith("shm") else "gloo"
    world = lockstep.init(backend=backend)
    workload = next(one for one in WORKLOADS if one.name == name)
    inputs, targets = workload.batch(world.rank)
    dist.all_reduce(torch.ones(1))
    before = resident_mb()
    model = workload.build()
    if contender.startswith("lockstep"):
        model = lockstep.parallelize(model)
    elif contender.startswith("torch"):
        model = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for _ in range(10):
        optimizer.zero_grad()
        workload.loss(model(inputs), targets).backward()
        optimizer.step()
    grown = torch.tensor(peak_mb() - before, dtype=torch.float64)
    dist.all_reduce(grown, op=dist.ReduceOp.MAX)
    if world.rank == 0:
        print(json.dumps(grown.item()))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nprocs", type=int, default=2)
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        measure(*args.measure)
        return
    from benchmarks.models import WORKLOADS

    table = Table(
        "model", *CONTENDERS, title=f"MB that a rank's peak is above its start, {args.nprocs} ranks"
    )
    for workload in WORKLOADS:
        row = []
        for contender in CONTENDERS:
            command = [
                *(sys.executable, "-m", "lockstep", "run", "-n", str(args.nprocs)),
                *("-m", "benchmarks.memory", "--measure", contender, workload.name),
            ]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            row.append(f"{float(done.stdout.split()[-1]):.0f}")
        table.add_row(workload.name, *row)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
