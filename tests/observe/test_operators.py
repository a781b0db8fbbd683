"""``lockstep run --trace-operators``: the operators of each phase, by rank."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn, profiler
from torch.autograd import DeviceType

from lockstep.errors import TraceError
from lockstep.observe.analysis import step_times
from lockstep.observe.operators import Operator, operators, operators_of, recording_operators
from lockstep.observe.records import RankSpans
from lockstep.observe.summary import counted_of
from lockstep.observe.trace_files import read_folder
from lockstep.observe.tracing import recording
from tests.observe.traced import rank_of


def event(name: str, start: float, stop: float, own: float = 0, device: str = "CPU") -> Any:
    times = SimpleNamespace(start=start, end=stop, elapsed_us=lambda: stop - start)
    return SimpleNamespace(
        name=name,
        time_range=times,
        self_cpu_time_total=own,
        device_type=getattr(DeviceType, device),
    )


OWN_PROFILER = (
    "--trace-operators records no more operators: the program uses torch's profiler itself. The "
    "trace has all else. Training goes on."
)


def test_operators_are_of_the_phase_in_which_they_begin() -> None:
    found = operators_of(
        [
            event("aten::linear", 0, 5, own=1),
            event("aten::addmm", 1, 5, own=4),
            event("lockstep: backward", 10, 20, own=3),
            event("aten::mm", 11, 13, own=2),
            event("aten::mm", 14, 15, own=1),
            event("Optimizer.step#SGD.step", 20, 30, own=9),
            event("aten::add_", 21, 22, own=1),
            event("aten::addmm", 31, 32, own=1),
            event("gemm", 12, 19, device="CUDA"),
        ]
    )
    assert [*found] == [
        Operator("forward", "aten::addmm", 2, 5000),
        Operator("forward", "aten::linear", 1, 1000),
        Operator("backward", "aten::mm", 2, 3000),
        Operator("optimizer", "aten::add_", 1, 1000),
        Operator("kernel", "gemm", 1, 7000),
    ]


def ranks_with_operators() -> list[RankSpans]:
    ends = [10 * step + 10 for step in range(8)]
    ranks = []
    for rank in range(2):
        rows = [["forward", "aten::addmm", 6, (rank + 1) * 3_000_000]]
        rows += [["backward", "aten::mm", 12, 9_000_000]] * (rank == 1)
        found = rank_of(rank, [end - 5 for end in ends], ends)
        facts = {"host": "h", "operators": rows, "first": 2, "profiled": 3}
        ranks.append(found._replace(facts=facts))
    return ranks


def test_operators_are_shown_by_rank_in_ms_a_step() -> None:
    section = operators(ranks_with_operators())
    assert section is not None
    assert section.columns == ("operator", "in", "calls a step", "rank 0, ms", "rank 1, ms")
    assert section.rows == [
        ["aten::addmm", "forward", "2", "1.00", "2.00"],
        ["aten::mm", "backward", "4", "-", "3.00"],
    ]
    assert "in steps 2 to 4" in section.note
    assert operators([rank_of(0, [5], [10])]) is None


def test_steps_whose_operators_were_recorded_do_not_count() -> None:
    ranks = ranks_with_operators()
    counted = counted_of(ranks, step_times(ranks))
    # Step 0 is the first, and in step 5 the recording ended.
    assert [each[0].step for each in counted] == [1, 6, 7]


def test_operators_of_a_program_are_recorded_and_read(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with recording(tmp_path, 0) as trace, recording_operators(0, lambda: trace.step, trace.put):
        for _ in range(7):
            model(torch.ones(2, 8)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    [found] = read_folder(tmp_path)
    assert (found.facts["first"], found.facts["profiled"]) == (2, 3)
    rows = {(phase, name): calls for phase, name, calls, _ in found.facts["operators"]}
    assert rows["forward", "aten::addmm"] == 3
    assert rows["backward", "aten::mm"] >= 3
    assert not any(name.startswith(("lockstep", "Optimizer")) for _, name in rows)
    assert not capfd.readouterr().err  # of what torch's profiler says by itself


@pytest.mark.parametrize(
    ("first", "last", "num_put"), [(1, 9, 0), (2, 3, 0), (4, 9, 1), (4, 4, 1), (8, 9, 1)]
)
@pytest.mark.parametrize("is_warmed_up", [False, True])
def test_a_profiler_of_the_programs_own_has_what_it_asks_for(
    first: int, last: int, num_put: int, is_warmed_up: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """There is one in a process: ours ends, or doesn't begin, and says so."""
    warmed_up = profiler.schedule(wait=0, warmup=1, active=last - first + 1, repeat=1)
    own = profiler.profile(schedule=warmed_up if is_warmed_up else None, acc_events=True)
    put, step = list[dict[str, Any]](), -1
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with recording_operators(0, lambda: step, put.append):
        for step in range(12):
            if step == first - is_warmed_up:
                own.start()
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            if is_warmed_up and first - 1 <= step <= last:
                own.step()
            elif step == last:
                own.stop()
    names = [event.name for event in own.events() or ()]
    assert names.count("aten::addmm") == last - first + 1
    begun = first - is_warmed_up
    assert len(put) == (num_put if begun > 2 else 0)
    told = [record.message for record in caplog.records]
    assert told == [OWN_PROFILER] * (begun <= 5)


@pytest.mark.parametrize("method", ["start", "stop"])
def test_a_profiler_that_fails_ends_no_training(
    method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: Any) -> None:
        if method == "stop":
            stop(self)
        raise RuntimeError("no room for events")

    stop = profiler.profile.stop
    monkeypatch.setattr(profiler.profile, method, fail)
    optimizer, now = torch.optim.SGD([torch.ones(1)], lr=0.01), SimpleNamespace(step=0)
    with recording_operators(0, partial(getattr, now, "step"), fail):
        for now.step in range(8):
            optimizer.step()
    assert [record.message for record in caplog.records] == [
        "--trace-operators records no more operators: no room for events. The trace has all else. "
        "Training goes on."
    ]


@pytest.mark.parametrize(
    "rows", ["5", '[["forward", "mm", 0, 1]]', '[["forward", 1, 1, 1]]', "[[]]"]
)
def test_operators_that_no_rank_writes_are_refused(tmp_path: Path, rows: str) -> None:
    line = f'{{"operators": {rows}, "first": 2, "profiled": 3}}\n'
    (tmp_path / "rank-0.spans").write_text('{"rank": 0, "host": "h"}\n' + line)
    with pytest.raises(TraceError, match="line 2, isn't of a trace: 'operators' is"):
        read_folder(tmp_path)
