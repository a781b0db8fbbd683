"""Peak memory of a rank: ours, torch's DDP with gradient_as_bucket_view, and no communication.

    python -m benchmarks.memory [--nprocs 2] [--rounds 5]

The contenders take turns, each in new processes in every round. The first table has the growth of
the resident memory's peak since before the model was built, in MB, on the rank with the larger
growth: the median, lowest and highest of the rounds. The layout of the C library's heap makes a
difference of up to a tenth between rounds. Each rank counts all shared memory that it has touched,
its peers' included. The second table has the growth of the memory of all tensors within a later
step, at its peak, which is the same in every round.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
from itertools import accumulate

from rich.console import Console
from rich.progress import Progress
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
    from benchmarks.models import BY_NAME

    _ = lockstep.parallelize  # imported when it is first used
    backend = "shm" if contender.endswith("shm") else "gloo"
    world = lockstep.init(backend=backend)
    workload = BY_NAME[name]
    inputs, targets = workload.batch(world.rank)
    dist.all_reduce(torch.ones(1))
    before = resident_mb()
    model = workload.build()
    if contender.startswith("lockstep"):
        model = lockstep.parallelize(model)
    elif contender.startswith("torch"):
        model = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        workload.loss(model(inputs), targets).backward()
        optimizer.step()

    for _ in range(10):
        step()
    grown = peak_mb() - before
    with torch.profiler.profile(profile_memory=True) as profile:
        step()
    results = profile.profiler.kineto_results.events()
    lent = sorted((e.start_ns(), e.nbytes()) for e in results if e.name() == "[memory]")
    alive = max(accumulate(num_bytes for _, num_bytes in lent)) / 1e6
    figures = torch.tensor([grown, alive], dtype=torch.float64)
    dist.all_reduce(figures, op=dist.ReduceOp.MAX)
    if world.rank == 0:
        print(json.dumps(figures.tolist()))


def measured(contender: str, name: str, nprocs: int) -> list[float]:
    """The same in new processes."""
    command = [
        *(sys.executable, "-m", "lockstep", "run", "-n", str(nprocs)),
        *("-m", "benchmarks.memory", "--measure", contender, name),
    ]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    figures: list[float] = json.loads(done.stdout.partition("[rank 0]")[2])
    return figures


def in_words(grown: tuple[float, ...]) -> str:
    return f"{statistics.median(grown):.0f} ({min(grown):.0f}-{max(grown):.0f})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nprocs", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        measure(*args.measure)
        return
    from benchmarks.models import WORKLOADS

    table = Table(
        "model", *CONTENDERS, title=f"MB that a rank's peak is above its start, {args.nprocs} ranks"
    )
    tensors = Table("model", *CONTENDERS, title="MB of tensors at the peak of a step")
    with Progress(transient=True) as progress:
        task = progress.add_task("training", total=len(WORKLOADS) * args.rounds)
        for workload in WORKLOADS:
            rounds = []
            for _ in range(args.rounds):
                rounds.append([measured(one, workload.name, args.nprocs) for one in CONTENDERS])
                progress.advance(task)
            columns = [[*zip(*found, strict=True)] for found in zip(*rounds, strict=True)]
            table.add_row(workload.name, *(in_words(grown) for grown, _ in columns))
            tensors.add_row(workload.name, *(f"{max(alive):.2f}" for _, alive in columns))
    for each in (table, tensors):
        Console(width=120).print(each)


if __name__ == "__main__":
    main()
