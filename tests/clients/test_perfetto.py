"""Perfetto's own trace processor finds in a trace what the ranks have written to it.

It is a program of 100 MB, which the package ``perfetto`` would download. The test needs it on the
PATH, as ``trace_processor_shell``.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

import lockstep

PROGRAM = shutil.which("trace_processor_shell")

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="trace_processor_shell isn't on the PATH")

SLICES = """
select process.name || ', ' || thread.name as track, slice.name as name, ts, dur,
    extract_arg(slice.arg_set_id, 'args.step') as step
from slice join thread_track on track_id = thread_track.id
join thread using (utid) join process using (upid)
"""


def traced_training(world: lockstep.World, folder: Path) -> None:
    model = lockstep.parallelize(torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4))))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = lockstep.DataLoader(TensorDataset(torch.ones(40, 8)), batch_size=4)
    with lockstep.trace(folder):
        for (x,) in loader:
            optimizer.zero_grad()
            loss = lockstep.mean(model(x).square())
            loss.backward()
            optimizer.step()
            lockstep.log(loss=loss)
        lockstep.save(folder / "checkpoint", model=model)


def test_every_span_is_a_slice_on_the_track_of_its_rank(tmp_path: Path) -> None:
    perfetto = pytest.importorskip("perfetto.trace_processor")
    lockstep.launch(traced_training, 3, (tmp_path,))
    events = json.loads((tmp_path / "trace.json").read_text())
    threads = {(e["pid"], e["tid"]): e["args"] for e in events if e["name"] == "thread_name"}
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    config = perfetto.TraceProcessorConfig(bin_path=PROGRAM)
    with perfetto.TraceProcessor(trace=str(tmp_path / "trace.json"), config=config) as processor:
        errors = "select name from stats where value > 0 and severity in ('error', 'data_loss')"
        assert [row.name for row in processor.query(errors)] == []
        found = Counter(
            (row.track, row.name, row.step, row.ts, row.dur) for row in processor.query(SLICES)
        )
        counters = {row.name for row in processor.query("select name from counter_track")}
    written = Counter(
        (
            f"{processes[e['pid']]}, {threads[e['pid'], e['tid']]['name']}",
            e["name"],
            e["args"]["step"],
            round(e["ts"] * 1000),
            round(e["dur"] * 1000),
        )
        for e in events
        if e["ph"] == "X"
    )
    assert found == written
    assert {"log loss", "memory resident"} <= counters
