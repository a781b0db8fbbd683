"""The example programs run as their first lines say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
ONE_RANK = [sys.executable]
TWO_RANKS = [sys.executable, "-m", "lockstep", "run", "-n", "2"]
THREE_RANKS = [sys.executable, "-m", "lockstep", "run", "-n", "3"]
START = pytest.mark.parametrize(
    ("start", "num_ranks"),
    [(ONE_RANK, 1), (TWO_RANKS, 2), (THREE_RANKS, 3)],
    ids=["python", "two ranks", "three ranks"],
)


def output_of(start: list[str], program: str, *options: str) -> str:
    run = subprocess.run(
        [*start, str(EXAMPLES / program), *options], capture_output=True, text=True, timeout=100
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


@START
def test_synchronous_sgd(start: list[str], num_ranks: int) -> None:
    output = output_of(start, "synchronous_sgd.py", "--epochs", "6")
    losses = [float(loss) for loss in re.findall(r"epoch \d+: mean loss ([\d.]+)", output)]
    assert len(losses) == 6
    assert losses[-1] < losses[0]


@START
def test_any_method(start: list[str], num_ranks: int) -> None:
    output = output_of(start, "any_method.py")
    losses = [float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+)", output)]
    assert losses[-1] < losses[0] / 100
    assert f"ranks: {num_ranks}; all of them hold the same parameters" in output
