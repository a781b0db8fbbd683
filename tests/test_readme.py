"""The front page: short, its program runs, its links lead somewhere, its figures were measured."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.forks

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= 130


def test_its_links_lead_to_files_and_headings() -> None:
    targets = re.findall(r"\]\(([^)]+)\)", README)
    assert len(targets) > 15
    for target in targets:
        path, _, heading = target.partition("#")
        assert (ROOT / path).exists(), target
        headings = re.findall(r"^#+ (.*)$", (ROOT / path).read_text(), re.M) if heading else []
        anchors = {re.sub(r"[^\w -]", "", text).lower().replace(" ", "-") for text in headings}
        assert heading in {"", *anchors}, target


def test_its_figures_are_those_of_the_results() -> None:
    measured = (ROOT / "benchmarks" / "RESULTS.md").read_text()
    figures = re.findall(r"(\d+\.?\d*) (?:us|ms|s)\b", README)
    assert len(figures) >= 11
    for figure in figures:
        assert re.search(rf"(?<![\d.]){re.escape(figure)}(?![\d.])", measured), figure
    for command in re.findall(r"`([^`]*bench[^`]*)`", README):
        assert command in measured, command


def _losses(folder: Path, *start: str) -> list[float]:
    command = [sys.executable, *start, "train.py"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr
    return [float(loss) for loss in re.findall(r"epoch \d: loss ([\d.]+)", done.stdout)]


def test_its_program_has_the_same_losses_on_one_rank_and_on_two(tmp_path: Path) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", README, flags=re.S)
    assert len([line for line in program.splitlines() if line]) <= 22
    (tmp_path / "train.py").write_text(program)
    alone = _losses(tmp_path)
    assert len(alone) == 3
    assert _losses(tmp_path, "-m", "lockstep", "run", "-n", "2") == pytest.approx(alone, abs=2e-4)
