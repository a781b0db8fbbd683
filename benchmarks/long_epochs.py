"""What it takes to begin an epoch of very many samples: time, and growth of resident memory.

    python -m benchmarks.long_epochs [--rounds 3]

A dataset gives the index itself, in batches of 8. Each row is of new processes, which take turns:
the seconds until the first batch, and the growth of the peak of the resident memory until the
thousandth; medians. "again" is how long it takes until the first batch of a loader that goes on
from the state after it. "failed": the process ended with an error; it may take 16 GiB.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.memory import peak_mb, resident_mb

LOADERS = ("lockstep.DataLoader", "torch's DataLoader")
LENGTHS = (10**7, 10**8, 10**12)
# torch's shuffle makes a list of all numbers, of 40 bytes each.
MEMORY_LIMIT_BYTES = 16 * 2**30


def measure(loader: str, length: int, shuffle: bool) -> None:
    """Print the figures of one loader, in a process of its own."""
    import torch

    import lockstep
    from tests.data.numbers import Numbers

    kind: Any = lockstep.DataLoader if loader == LOADERS[0] else torch.utils.data.DataLoader
    next(iter(kind(Numbers(100), 8, shuffle=True)))  # what is imported when it is first used
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    before, began = resident_mb(), time.perf_counter()
    epoch = kind(Numbers(length), 8, shuffle=shuffle)
    batches = iter(epoch)
    next(batches)
    first = time.perf_counter() - began
    for _ in range(999):
        next(batches)
    found = {"first": first, "growth": max(0.0, peak_mb() - before)}
    if loader == LOADERS[0]:
        again: Any = kind(Numbers(length), 8, shuffle=shuffle)
        again.load_state_dict(epoch.state_dict())
        began = time.perf_counter()
        same = next(iter(again)).equal(next(batches))
        assert same
        found["again"] = time.perf_counter() - began
    print(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure is not None:
        loader, length, shuffle = args.measure
        return measure(loader, int(length), shuffle == "True")
    table = Table("samples", "shuffled", "loader", "first batch (s)", "growth (MB)", "again (s)")
    for length in LENGTHS:
        for shuffle in (False, True):
            found: dict[str, list[dict[str, float]]] = {loader: [] for loader in LOADERS}
            for _ in range(args.rounds):
                for loader in LOADERS:
                    case = (loader, str(length), str(shuffle))
                    command = [sys.executable, "-m", "benchmarks.long_epochs", "--measure", *case]
                    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
                    if done.returncode == 0:
                        found[loader].append(json.loads(done.stdout))
            for loader, rounds in found.items():
                row = [f"{length:.0e}", "yes" if shuffle else "no", loader]
                for name, digits in (("first", 3), ("growth", 1), ("again", 3)):
                    values = [each[name] for each in rounds if name in each]
                    row.append(f"{statistics.median(values):.{digits}f}" if values else "-")
                table.add_row(*row if rounds else [*row[:3], "failed", "-", "-"])
    Console(width=110).print(table)
    return None


if __name__ == "__main__":
    main()
