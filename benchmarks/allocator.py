"""Large gradients under settings of malloc: milliseconds a step, page faults, and memory.

    python -m benchmarks.allocator [--nprocs 2] [--rounds 3] [--only TEXT]

The C library maps each block of more than 32 MiB anew, and its pages come one by one as they are
written to. The settings take turns, each in new processes in every round, without communication and
with lockstep over shm. Milliseconds and those of the processor are medians of steps on the slower
rank; MB are above what the rank had before the model was built: at the peak, and at the end. All
are medians of the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.memory import peak_mb, resident_mb

SETTINGS = {
    "pages of 4 KiB": {"GLIBC_TUNABLES": "", "MALLOC_MMAP_MAX_": "65536"},
    "huge pages": {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1", "MALLOC_MMAP_MAX_": "65536"},
    "blocks are kept": {"GLIBC_TUNABLES": "", "MALLOC_MMAP_MAX_": "0"},
}
MODELS = ["EmbeddingBag, 500k x 32", "Linear, 4096 x 4096", "transformer, 9 M", "ConvNet"]
CONTENDERS = ["no communication", "lockstep, shm"]
NUM_STEPS = 20


def measure(name: str, contender: str) -> None:
    """Train, in each rank's process, and let rank 0 print what the slower one has taken."""
    import torch
    import torch.distributed as dist
    from torch import nn

    import lockstep
    from benchmarks.models import BY_NAME

    world = lockstep.init(backend="shm")
    before = resident_mb()
    if name in BY_NAME:
        workload = BY_NAME[name]
        model, (x, y) = workload.build(), workload.batch(world.rank)
    elif name.startswith("Linear"):
        model, x = nn.Linear(4096, 4096, bias=False), torch.randn(32, 4096)
    else:
        model, x = nn.EmbeddingBag(500_000, 32, mode="sum"), torch.randint(500_000, (256, 20))
    if contender != CONTENDERS[0]:
        model = lockstep.parallelize(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad()
        output = model(x)
        (workload.loss(output, y) if name in BY_NAME else output.square().mean()).backward()
        optimizer.step()

    taken, processor = [], []
    for number in range(5 + NUM_STEPS):
        dist.barrier()
        began, busy = time.perf_counter(), time.process_time()
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        step()
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
        if number >= 5:
            taken.append((time.perf_counter() - began) * 1000)
            processor.append((time.process_time() - busy) * 1000)
    medians = statistics.median(taken), statistics.median(processor)
    figures = torch.tensor([*medians, faults, peak_mb() - before, resident_mb() - before])
    dist.all_reduce(figures, op=dist.ReduceOp.MAX)
    if world.rank == 0:
        print(json.dumps(figures.tolist()))


def measured(name: str, contender: str, setting: str, nprocs: int) -> list[float]:
    command = [
        *(sys.executable, "-m", "lockstep", "run", "-n", str(nprocs)),
        *("-m", "benchmarks.allocator", "--measure", name, contender),
    ]
    environ = os.environ | SETTINGS[setting]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    figures: list[float] = json.loads(done.stdout.partition("[rank 0]")[2])
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nprocs", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="models with this text in their name")
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(*options.measure)
        return
    cases = [(m, c, s) for m in MODELS if options.only in m for c in CONTENDERS for s in SETTINGS]
    found: dict[tuple[str, str, str], list[list[float]]] = {case: [] for case in cases}
    with Progress(console=Console(stderr=True)) as progress:
        for _ in progress.track(range(options.rounds), description="rounds"):
            for case in cases:
                found[case].append(measured(*case, options.nprocs))
    columns = "ms", "of the processor", "page faults", "MB at the peak", "MB at the end"
    table = Table("model", "", "large blocks", *columns)
    for case, rounds in found.items():
        medians = [statistics.median(column) for column in zip(*rounds, strict=True)]
        table.add_row(
            *case, *(f"{n:,.1f}" if i < 2 else f"{n:,.0f}" for i, n in enumerate(medians))
        )
    Console().print(table)


if __name__ == "__main__":
    main()
