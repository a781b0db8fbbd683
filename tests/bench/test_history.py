"""Lines of ratios by date: what is appended, and that the file has no others."""

from __future__ import annotations

import datetime
import json
import sys
from pathlib import Path

import pytest

from benchmarks import history

TIMES = {
    "MLP": {
        "no communication": [4.0, 4.0, 8.0],
        "lockstep, shm": [5.0, 6.0, 8.0],
        "torch DDP, gloo": [10.0, 18.0, 8.0],
    }
}


def test_a_line_has_medians_of_ratios_within_rounds() -> None:
    line = history.line_of(TIMES, datetime.date(2026, 12, 1))
    assert line["date"] == "2026-12-01"
    assert line["ratios"] == {"MLP": {"lockstep / no communication": 1.25, "DDP / lockstep": 2.0}}


def test_a_line_is_appended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "steps.json").write_text(json.dumps(TIMES))
    (tmp_path / "history.jsonl").write_text('{"date": "2026-11-30"}\n')
    monkeypatch.setattr(history, "HISTORY", tmp_path / "history.jsonl")
    monkeypatch.setattr(sys, "argv", ["history", str(tmp_path / "steps.json")])
    history.main()
    first, last = map(json.loads, (tmp_path / "history.jsonl").read_text().splitlines())
    assert first == {"date": "2026-11-30"}
    assert last.keys() == {"date", "processor", "cores", "torch", "ratios"}


def test_the_history_has_lines_in_the_order_of_their_dates() -> None:
    lines = [*map(json.loads, history.HISTORY.read_text().splitlines())]
    dates = [datetime.date.fromisoformat(line["date"]) for line in lines]
    assert dates == sorted(dates)
    for line in lines:
        assert all(of.keys() == history.PAIRS.keys() for of in line["ratios"].values())
