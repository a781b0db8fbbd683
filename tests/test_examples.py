"""The example programs run as their first lines say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.forks

EXAMPLES = Path(__file__).parent.parent / "examples"
ONE_RANK = [sys.executable]
TWO_RANKS = [sys.executable, "-m", "lockstep", "run", "-n", "2"]
THREE_RANKS = [sys.executable, "-m", "lockstep", "run", "-n", "3"]
START = pytest.mark.parametrize(
    ("start", "num_ranks"),
    [
        pytest.param(ONE_RANK, 1, id="python"),
        pytest.param(TWO_RANKS, 2, id="two ranks"),
        pytest.param(THREE_RANKS, 3, id="three ranks", marks=pytest.mark.long),
    ],
)


def output_of(start: list[str], program: str, *options: str) -> str:
    run = subprocess.run(
        [*start, str(EXAMPLES / program), *options], capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


# An epoch takes seconds.
@pytest.mark.parametrize(
    ("start", "num_ranks"),
    [
        pytest.param(ONE_RANK, 1, id="python", marks=pytest.mark.long),
        pytest.param(TWO_RANKS, 2, id="two ranks"),
        pytest.param(THREE_RANKS, 3, id="three ranks", marks=pytest.mark.long),
    ],
)
@pytest.mark.long
def test_synchronous_sgd(start: list[str], num_ranks: int) -> None:
    output = output_of(start, "synchronous_sgd.py", "--epochs", "2")
    losses = [float(loss) for loss in re.findall(r"epoch \d+: mean loss ([\d.]+)", output)]
    assert len(losses) == 2
    assert losses[-1] < losses[0]


@START
def test_any_method(start: list[str], num_ranks: int) -> None:
    output = output_of(start, "any_method.py")
    losses = [float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+)", output)]
    assert losses[-1] < losses[0] / 100
    assert f"ranks: {num_ranks}; all of them hold the same parameters" in output


DEVICES = pytest.mark.parametrize(
    "devices",
    [
        pytest.param((), id="default"),
        pytest.param(("cpu",) * 3, id="three", marks=pytest.mark.long),
    ],
)


@DEVICES
def test_data_parallel_parts(devices: tuple[str, ...]) -> None:
    output = output_of(ONE_RANK, "data_parallel_parts.py", *devices)
    for line, name in zip(output.splitlines(), ("Sandwich", "Words"), strict=True):
        assert line.startswith(f"{name}: ")
        assert f" on {', '.join(devices or ('cpu', 'cpu'))}, " in line
        first, last, alone = map(float, re.findall(r"\d+\.\d{4}", line))
        assert last < first / 4
        assert last == pytest.approx(alone, rel=1e-3, abs=1e-4)


@DEVICES
def test_data_parallel_by_hand(devices: tuple[str, ...]) -> None:
    output = output_of(ONE_RANK, "data_parallel_by_hand.py", *devices)
    rows = [int(count) for count in re.findall(r"(\d+) rows on cpu", output)]
    assert len(rows) == len(devices or ("cpu", "cpu"))
    assert sum(rows) == 13
    differences = [float(number) for number in re.findall(r"gradients: (\S+)", output)]
    assert len(differences) == 2
    assert max(differences) < 1e-12


@START
def test_resumed_steps(start: list[str], num_ranks: int) -> None:
    expected = output_of(start, "resumed_steps.py")
    assert "0 restarts; parameters " in expected
    losses = [float(loss) for loss in re.findall(r"epoch \d+: mean loss ([\d.]+)", expected)]
    assert losses[-1] < losses[0] / 2
    if start is ONE_RANK:
        return
    found = output_of(
        [*start, "--restarts", "3"], "resumed_steps.py", "--kill-at", *map(str, (3, 40, 90))
    )
    assert "3 restarts; parameters " in found
    assert found.split()[-1] == expected.split()[-1]
