"""``log()`` and ``log_to()``: where numbers of steps go."""

from __future__ import annotations

import csv
import json
import math
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

import lockstep
from lockstep import spans
from lockstep.observe import logger, report
from lockstep.observe.trace_files import read_folder
from lockstep.run_status import RunStatus

pytestmark = pytest.mark.usefixtures("nothing_logged")


def test_rank_0_is_recorded_with_steps_that_count_up(tmp_path: Path) -> None:
    got: list[tuple[int, Mapping[str, float]]] = []

    def body(world: lockstep.World) -> None:
        if world.rank == 0:
            lockstep.log_to(lambda step, values: got.append((step, values)), lines=False)
        lockstep.reduce(1.0)
        lockstep.log(loss=float(world.rank))
        lockstep.log({"val/loss": torch.tensor(0.5, requires_grad=True)}, accuracy=np.float32(0.25))
        lockstep.log(loss=3, step=10)
        lockstep.log(loss=4)

    lockstep.launch(body, 2, ranks="threads")
    both = {"val/loss": 0.5, "accuracy": 0.25}
    assert got == [(0, {"loss": 0.0}), (1, both), (10, {"loss": 3.0}), (11, {"loss": 4.0})]


def test_files_have_a_row_for_each_call_and_are_continued(tmp_path: Path) -> None:
    names = tmp_path / "run" / "log.csv", tmp_path / "log.jsonl"
    lockstep.log_to(*names, lines=False)
    lockstep.log(loss=0.5)
    lockstep.log(loss=math.nan, lr=0.1)
    lockstep.log(lr=0.05, step=7)
    assert [*csv.reader(names[0].read_text().splitlines())] == [
        ["step", "loss", "lr"],
        ["0", "0.5", ""],
        ["1", "nan", "0.1"],
        ["7", "", "0.05"],
    ]
    assert [*map(json.loads, names[1].read_text().splitlines())] == [
        {"step": 0, "loss": 0.5},
        {"step": 1, "loss": None, "lr": 0.1},
        {"step": 7, "lr": 0.05},
    ]
    # A program that goes on from a checkpoint has other columns, in another order.
    lockstep.log_to(*names, lines=False)
    lockstep.log({"lr": 0.01, "a,b": 1}, step=8)
    rows = [*csv.reader(names[0].read_text().splitlines())]
    assert rows[0] == ["step", "loss", "lr", "a,b"]
    assert rows[1] == ["0", "0.5", "", ""]
    assert rows[-1] == ["8", "", "0.01", "1.0"]
    assert len(rows) == 5
    lockstep.log_to()
    assert len(names[1].read_text().splitlines()) == 4


# What TensorBoard 2.21 writes itself at 1.5 s after 1970.
EVENTS = """
1800000000000000a37f4b2209000000000000f83f1a0d627261696e2e4576656e743a322a28646c1b00000000000000
1a0d9e1309000000000000f83f10ac022a0d0a0b0a046c6f7373150000003f69f9315b9e00000000000000da84ca4509
000000000000f83f10ac022a8f010a8c010a8401785b2fc3bc5d785b2fc3bc5d785b2fc3bc5d785b2fc3bc5d785b2fc3
bc5d785b2fc3bc5d785b2fc3bc5d785b2fc3bc5d785b2fc3bc5d785b2fc3bc5d785b2fc3bc5d785b2fc3bc5d785b2fc3
bc5d785b2fc3bc5d785b2fc3bc5d785b2fc3bc5d785b2fc3bc5d785b2fc3bc5d785b2fc3bc5d785b2fc3bc5d785b2fc3
bc5d785b2fc3bc5d15000080ff8e27114f
"""


def test_a_folder_is_tensorboards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 1.5)
    lockstep.log_to(tmp_path / "board", lines=False)
    lockstep.log({"loss": 0.5, "x[/ü]" * 22: -1e300}, step=300)
    (file,) = (tmp_path / "board").glob("events.out.tfevents.*")
    assert file.read_bytes().hex() == "".join(EVENTS.split())
    lockstep.log_to(tmp_path / "board", lines=False)  # another file
    assert len([*(tmp_path / "board").iterdir()]) == 2
    lockstep.log_to(lines=False)


def test_what_is_no_number_is_refused_by_its_name(tmp_path: Path) -> None:
    for bad in ("0.5", None, torch.ones(2)):
        with pytest.raises(TypeError, match="'loss' in log"):
            lockstep.log(loss=bad)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a dict of numbers by name"):
        lockstep.log(0.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="step"):
        lockstep.log(loss=0.5, step=-1)
    with pytest.raises(TypeError, match="a path or a function"):
        lockstep.log_to(3)  # type: ignore[arg-type]
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        lockstep.log_to(tmp_path / "file" / "log.csv")


def test_lines_are_printed_at_first_then_every_ten_seconds_and_at_the_end(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    time = [100.0]
    monkeypatch.setattr(spans, "now", lambda: int(time[0] * 1e9))
    lockstep.log_to()
    for step in range(45):
        lockstep.log(loss=step / 8, total=60)
        time[0] += 0.5
    lockstep.log({"val/loss": 0.5}, step=44)
    logger._logger._print_rest()
    logger._logger._print_rest()
    assert capsys.readouterr().err.splitlines() == [
        "step 0/60  loss 0",
        "step 20/60  loss 2.5  2 steps/s  0:20 left",
        "step 40/60  loss 5  2 steps/s  0:10 left",
        "step 44/60  loss 5.5  val/loss 0.5  1.6 steps/s  0:10 left",
    ]


def test_no_lines_where_the_launcher_shows_them(capsys: pytest.CaptureFixture[str]) -> None:
    lockstep.log_to()
    status = RunStatus.create("train.py", 1).ranks[0]
    status.is_shown = True
    spans.status = status
    try:
        lockstep.log(loss=0.5, step=3, total=9)
    finally:
        spans.status = None
    assert capsys.readouterr().err == ""
    shown = status.read()
    assert (shown.logged_step, shown.last_step, shown.values) == (3, 9, {"loss": 0.5})


def test_the_report_of_a_trace_draws_what_was_logged(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter])
    with lockstep.trace(tmp_path):
        for step in range(4):
            parameter.square().sum().backward()
            optimizer.step()
            lockstep.log(loss=math.inf if step == 2 else step)
    (rank,) = read_folder(tmp_path)
    assert [entry["log"]["loss"] for entry in rank.logged] == [0, 1, math.inf, 3]
    report(str(tmp_path))
    assert 'data-name="loss"' in (tmp_path / "report.html").read_text()
    # Perfetto's JSON has no infinity.
    events = json.loads((tmp_path / "trace.json").read_text(), parse_constant=pytest.fail)
    counters = [event for event in events if event["ph"] == "C"]
    assert [e["args"]["loss"] for e in counters if e["name"] == "log"] == [0, 1, 3]
