"""Programs for one device, and what the docs make of them in a few lines: they are the same.

Those in ``alone`` know nothing of lockstep; those in ``parallel`` were changed by the docs alone.
"""

from __future__ import annotations

import difflib
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
NUM_STEPS = {"cnn": 72, "gpt": 12, "gan": 30, "lstm": 56, "recommender": 60}
LOCKSTEP = [sys.executable, "-m", "lockstep"]
TWO_RANKS = [*LOCKSTEP, "run", "-n", "2"]

each_program = pytest.mark.parametrize("name", NUM_STEPS)
pytestmark = pytest.mark.forks


def _output_of(command: list[str], folder: Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=400)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    return done.stdout + done.stderr


def test_all_programs_are_tested() -> None:
    for folder in "alone", "parallel":
        assert {path.stem for path in (HERE / folder).glob("*.py")} == set(NUM_STEPS)


@each_program
def test_few_lines_are_changed(name: str) -> None:
    alone, parallel = (
        [line for line in (HERE / folder / f"{name}.py").read_text().splitlines() if line]
        for folder in ("alone", "parallel")
    )
    assert not any("lockstep" in line for line in alone)
    changes = difflib.SequenceMatcher(None, alone, parallel, autojunk=False).get_opcodes()
    assert 3 < sum(max(b - a, d - c) for kind, a, b, c, d in changes if kind != "equal") <= 8


@pytest.mark.long
@each_program
def test_two_ranks_print_what_one_device_does(name: str, tmp_path: Path) -> None:
    """All losses, norms and metrics, in float64, in which rounding doesn't show."""
    program = str(HERE / "in_float64.py")
    alone = _output_of([sys.executable, program, str(HERE / "alone" / f"{name}.py")], tmp_path)
    parallel = _output_of([*TWO_RANKS, program, str(HERE / "parallel" / f"{name}.py")], tmp_path)
    assert len(alone.splitlines()) >= 3
    lines = re.findall(r"^\[rank 0\] ((?:epoch|step) .*)$", parallel, flags=re.MULTILINE)
    for line, expected in zip(lines, alone.splitlines(), strict=True):
        numbers, wanted = (re.findall(r"-?\d+\.?\d*", each) for each in (line, expected))
        assert [*map(float, numbers)] == pytest.approx([*map(float, wanted)], abs=3e-6)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.long if name == "gpt" else pytest.mark.thorough)
        for name in NUM_STEPS
    ],
)
def test_the_check_finds_nothing(name: str, tmp_path: Path) -> None:
    program = str(HERE / "parallel" / f"{name}.py")
    output = _output_of([*TWO_RANKS, "--check", "5", program], tmp_path)
    assert "All parameters and buffers are alike after each of 5 steps" in output


@pytest.mark.long
@each_program
def test_the_report_tells_of_what_was_done(name: str, tmp_path: Path) -> None:
    program = str(HERE / "parallel" / f"{name}.py")
    _output_of([*TWO_RANKS, "--trace", "traced", program], tmp_path)
    report = _output_of([*LOCKSTEP, "report", "traced"], tmp_path)
    assert f"{NUM_STEPS[name]} steps of 2 ranks." in " ".join(report.split())
    loaders = dict(re.findall(r"^ \w+ \((\d)\) +(\w+)", report, flags=re.MULTILINE))
    expected = ["training", "evaluation"][: {"gpt": 0, "gan": 1}.get(name)]
    assert [*loaders.values()] == expected
