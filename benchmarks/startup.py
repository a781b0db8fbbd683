"""Seconds from command to first collective: ``lockstep run`` and torchrun, side by side.

    python -m benchmarks.startup [--rounds 7] [--nprocs 2]

Both start the same script, which joins its ranks through lockstep.init(), all-reduces one number
and notes the time. The two take turns.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

FIRST_COLLECTIVE = """
import sys, time
import torch, torch.distributed as dist
import lockstep
world = lockstep.init()
total = torch.ones(1)
dist.all_reduce(total)
assert total.item() == world.world_size
if world.rank == 0:
    open(sys.argv[1], "w").write(repr(time.time()))
"""


def commands(nprocs: int) -> dict[str, list[str]]:
    count = str(nprocs)
    return {
        "lockstep run": [sys.executable, "-m", "lockstep", "run", "-n", count],
        "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone",
                     "--nproc-per-node", count],
    }  # fmt: skip


def seconds_to_first_collective(command: list[str], folder: Path) -> float:
    script, note = folder / "first.py", folder / "when"
    script.write_text(FIRST_COLLECTIVE)
    began = time.time()
    subprocess.run([*command, str(script), str(note)], check=True, capture_output=True)
    return float(note.read_text()) - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--nprocs", type=int, default=2)
    args = parser.parse_args()
    seconds: dict[str, list[float]] = {name: [] for name in commands(args.nprocs)}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(args.rounds + 1):
            for name, command in commands(args.nprocs).items():
                value = seconds_to_first_collective(command, Path(folder))
                if number:  # the first round fills the disk's cache
                    seconds[name].append(value)
    title = f"command to first collective, {args.nprocs} ranks, {args.rounds} rounds"
    table = Table("command", "median s", "lowest", "highest", title=title)
    for name, values in seconds.items():
        figures = (statistics.median(values), min(values), max(values))
        table.add_row(name, *(f"{figure:.2f}" for figure in figures))
    ratio = statistics.median(
        ours / theirs
        for ours, theirs in zip(seconds["lockstep run"], seconds["torchrun"], strict=True)
    )
    Console().print(table, f"lockstep run / torchrun, median of the rounds: {ratio:.2f}")


if __name__ == "__main__":
    main()
