"""``lockstep report A B``: two runs beside each other."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import lockstep
from lockstep import cli
from lockstep.observe import report
from lockstep.observe.compare import Run, compared
from lockstep.observe.ladder import Ladder, Rung
from lockstep.observe.sections import Rate
from tests.observe.traced import Slow, train_slowly


def run(name: str, ideal: float, *, samples: int | None = 64, **rungs: float) -> Run:
    found = [Rung(each, each, "", seconds, seconds) for each, seconds in rungs.items()]
    seconds = ideal + sum(rungs.values())
    steps = Ladder(2, ideal, found, seconds, 2 * ideal, "measured", True, {})
    return Run(name, steps, Rate("samples/s", (samples or 1) / seconds, []), samples)


def test_runs_are_compared_rung_by_rung() -> None:
    before = run("slow", 0.010, data=0.004, transfer=0.002)
    after = run("fast", 0.010, data=0.001, other=0.001)
    found = compared(before, after)
    assert found.title == "fast beside slow"
    assert found.columns == ("ms a step", "slow", "fast", "difference")
    assert found.rows == [
        ["ideal", "10.0", "10.0", "0.00"],
        ["data", "4.0", "1.0", "-3.00"],
        ["other", "0.0", "1.0", "+1.00"],
        ["transfer", "2.0", "0.0", "-2.00"],
        ["a step", "16.0", "12.0", "-4.00"],
    ]
    assert "A step of fast takes 12.0 ms, 0.75 times as long as one of slow" in found.note
    assert "In samples/s fast is 1.33 times as fast." in found.note
    assert "What differs most is data: 3.00 ms less." in found.note
    assert "samples in a step are" not in found.note


def test_runs_with_other_batches_are_told_apart() -> None:
    found = compared(run("a", 0.010), run("b", 0.010, samples=None))
    assert "Their samples in a step are 64 and unknown." in found.note
    assert "differs most" not in found.note


def test_the_command_compares_two_traces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    for name, seconds in (("slow", 0.03), ("fast", 0.0)):
        slow = Slow("data", 1, seconds)
        lockstep.launch(train_slowly, 2, (tmp_path / name, slow), ranks="threads")
    words = ["lockstep", "report", str(tmp_path / "slow"), str(tmp_path / "fast")]
    monkeypatch.setattr(sys, "argv", words)
    cli.main()
    assert "fast beside slow" in capsys.readouterr().out
    assert ">fast beside slow</h2>" in (tmp_path / "fast" / "report.html").read_text()
    assert not (tmp_path / "slow" / "report.html").exists()
    report(str(tmp_path / "slow"), text=True)
    assert "beside slow" not in capsys.readouterr().out
