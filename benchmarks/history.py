"""Append a dated line of ratios to ``benchmarks/history.jsonl``.

    lockstep run -n 2 -m benchmarks.steps --json steps.json
    python -m benchmarks.history steps.json

Times differ between machines and hours; ratios within a round of turns differ less. Each line has
the date, the machine, and for each model the medians of two ratios: a step of lockstep to one
without communication, and a step of torch's DDP to one of lockstep.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
from collections.abc import Mapping
from pathlib import Path

import torch

HISTORY = Path(__file__).with_name("history.jsonl")
PAIRS = {
    "lockstep / no communication": ("lockstep, shm", "no communication"),
    "DDP / lockstep": ("torch DDP, gloo", "lockstep, shm"),
}

Times = Mapping[str, Mapping[str, list[float]]]


def processor() -> str:
    """The name of the processor, where Linux tells it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def line_of(times: Times, date: datetime.date) -> dict[str, object]:
    """What ``times``, by model and contender, come to."""
    ratios = {
        model: {
            pair: round(statistics.median(map(float.__truediv__, of[ours], of[theirs])), 3)
            for pair, (ours, theirs) in PAIRS.items()
        }
        for model, of in times.items()
    }
    machine = {"processor": processor(), "cores": len(os.sched_getaffinity(0))}
    return {"date": date.isoformat(), **machine, "torch": torch.__version__, "ratios": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("times", type=Path, help="what benchmarks.steps --json wrote")
    line = line_of(json.loads(parser.parse_args().times.read_text()), datetime.date.today())
    with HISTORY.open("a") as file:
        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
