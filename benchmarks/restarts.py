"""Seconds from a rank's SIGKILL to the restart's first line, and to its first step: side by side.

    python -m benchmarks.restarts [--kills 5] [--nprocs 2]

``lockstep run --restarts`` and torchrun (with a store of its own for each attempt, as otherwise an
attempt may read the addresses of the one before) take turns with the same script: an MLP of 1
million parameters, which takes up no state. In each run the last rank is killed once. The script's
first line imports nothing.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

PROGRAM = """
import os, sys, time
folder, restarts = sys.argv[1], os.environ["TORCHELASTIC_RESTART_COUNT"]
rank = os.environ["RANK"]

def note(what):
    with open(f"{folder}/{what}-{restarts}-{rank}.new", "w") as file:
        file.write(f"{time.monotonic()} {os.getpid()}")
    os.rename(file.name, file.name.removesuffix(".new"))

note("line")
import torch, lockstep
from torch import nn
lockstep.init()
torch.manual_seed(0)
layers = nn.Linear(64, 960), nn.ReLU(), nn.Linear(960, 960), nn.ReLU(), nn.Linear(960, 8)
net = nn.Sequential(*layers)
model = lockstep.parallelize(net)
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
x, y = torch.randn(32, 64), torch.randn(32, 8)
for step in range(100_000):
    lockstep.mean((model(x) - y).square().mean(1)).backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 0:
        note("step")
    if restarts == "1":
        break
    time.sleep(0.002)
"""
TIMEOUT_SECONDS = 60


def commands(nprocs: int) -> dict[str, list[str]]:
    ranks = ["--nproc-per-node", str(nprocs), "--max-restarts", "3"]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--monitor-interval", "0.01"]
    return {
        "lockstep run": [sys.executable, "-m", "lockstep", "run", *ranks],
        "torchrun": [sys.executable, *torchrun, *ranks],
    }


def wait_for(paths: list[Path]) -> list[list[str]]:
    """What all of these files hold, as soon as they are there."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not all(path.exists() for path in paths):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not all of {paths} came within {TIMEOUT_SECONDS} s")
        time.sleep(0.005)
    return [path.read_text().split() for path in paths]


def seconds_to_restart(command: list[str], nprocs: int) -> tuple[float, float]:
    """From a kill to the first line, and to the first step's end, on all ranks."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        script = folder / "program.py"
        script.write_text(PROGRAM)
        environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        process = subprocess.Popen(
            [*command, str(script), name],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            begun = wait_for([folder / f"step-0-{rank}" for rank in range(nprocs)])
            time.sleep(0.3)
            killed = time.monotonic()
            os.kill(int(begun[-1][1]), signal.SIGKILL)
            ends = []
            for what in ("line", "step"):
                notes = wait_for([folder / f"{what}-1-{rank}" for rank in range(nprocs)])
                ends.append(max(float(at) for at, _ in notes) - killed)
            process.wait(TIMEOUT_SECONDS)
        finally:
            process.terminate()
            process.wait()
        return ends[0], ends[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--nprocs", type=int, default=2)
    options = parser.parse_args()
    contenders = commands(options.nprocs)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    hangs = dict.fromkeys(contenders, 0)
    for _ in range(options.kills):
        for name, command in contenders.items():
            try:
                times[name].append(seconds_to_restart(command, options.nprocs))
            except TimeoutError:
                hangs[name] += 1
    table = Table(title=f"seconds from SIGKILL, {options.nprocs} ranks, MLP of 1 M parameters")
    for heading in ("", "first line: least", "median", "most", "first step: least", "median",
                    "most", "hangs"):  # fmt: skip
        table.add_column(heading, justify="right")
    for name, found in times.items():
        cells = []
        for column in zip(*found, strict=True) if found else ([float("nan")],) * 2:
            cells += [min(column), statistics.median(column), max(column)]
        table.add_row(name, *(f"{cell:.2f}" for cell in cells), str(hangs[name]))
    Console().print(table)
    for name, found in times.items():
        steps = " ".join(f"{seconds:.2f}" for seconds in sorted(step for _, step in found))
        print(f"{name}, seconds to the first step, in order: {steps}")
    print(f"load of the machine meanwhile: {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
