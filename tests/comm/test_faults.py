"""Ranks that are killed, stopped or mistaken: a few of the trials of benchmarks/faults.py."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.counts import num_examples

pytestmark = [pytest.mark.forks, pytest.mark.shortened]

_ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("scenario", "trials"),
    [("kill", 8), ("stop", 2), ("pause", 2), ("mismatch", 6), ("leave", 4), ("kill all", 4)],
)
def test_what_happens_to_a_rank_is_told_to_the_others(scenario: str, trials: int):
    trials = max(1, num_examples(trials))
    # How soon is for the benchmark to say: here, other tests may run beside. Of a rank that is
    # stopped the others wait for the whole timeout, which is as many seconds.
    patience = "4" if scenario == "stop" else "7"
    arguments = ["--only", scenario, "--trials", str(trials), "--seed", "1000"]
    arguments += ["--patience", patience]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.faults", *arguments],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
