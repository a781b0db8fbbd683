"""Ranks that are killed, stopped or mistaken: a few of the trials of benchmarks/faults.py."""

import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("scenario", "trials"),
    [("kill", 10), ("stop", 2), ("pause", 3), ("mismatch", 6), ("leave", 4), ("kill all", 4)],
)
def test_what_happens_to_a_rank_is_told_to_the_others(scenario: str, trials: int):
    arguments = ["--only", scenario, "--trials", str(trials), "--seed", "1000"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.faults", *arguments],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr
