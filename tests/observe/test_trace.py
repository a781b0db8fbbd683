"""``trace()``: every span of every rank, complete and nested, on one clock."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep import cli, launcher, spans
from lockstep.errors import TraceError
from lockstep.observe import clock, traced, tracing
from lockstep.observe.records import RankSpans
from lockstep.observe.trace_files import merge, read, read_folder, write_json
from tests.ranks import run_ranks

pytestmark = pytest.mark.forks

NUM_STEPS, CAP_MB = 6, 0.02
SCRIPT = """
import sys, torch, lockstep
from torch import nn
from tests.observe.test_trace import num_buckets
world = lockstep.init()
num_buckets(world, torch_loader="torch" in sys.argv, dies="die" in sys.argv)
"""


def num_buckets(world: lockstep.World, *, torch_loader: bool = False, dies: bool = False) -> int:
    """Take some steps, and return the number of buckets."""
    model = nn.Sequential(*[nn.Linear(40, 40) for _ in range(6)])
    model = lockstep.parallelize(model, bucket_cap_mb=CAP_MB, process_group=world.process_group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(0)  # ranks that are threads share torch's own
    dataset = TensorDataset(torch.randn(8 * NUM_STEPS, 40, generator=generator))
    loader: Any
    if torch_loader:
        loader = DataLoader(dataset, 8)
    else:
        loader = lockstep.DataLoader(dataset, 8, seed=0, process_group=world.process_group)
    for number, (x,) in enumerate(loader):
        if dies:
            time.sleep(0.02)  # steps of less than 10 ms aren't each written at once
        if dies and number == NUM_STEPS - 1 and world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        lockstep.mean(model(x).square(), process_group=world.process_group).backward()
        optimizer.step()
        optimizer.zero_grad()
    return 6


def traced_threads(world: lockstep.World, folder: Path, steps: Any = None) -> None:
    with lockstep.trace(folder, steps=steps):
        num_buckets(world)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def run(script: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lockstep", "run", "-n", "2", "--trace", str(folder)]
    return subprocess.run(
        [*command, str(script), *words],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


def check_complete(found: RankSpans, num_steps: int = NUM_STEPS, first: int = 0) -> None:
    steps = range(first, first + num_steps)
    names = Counter((span.name, span.step) for span in found.spans)
    for step in steps:
        for name in ("data", "forward", "backward", "optimizer"):
            assert names[name, step] == 1 + (name == "data" and step == NUM_STEPS), (name, step)
    assert {b.step for b in found.buckets} == {*steps}
    numbers = Counter(bucket.step for bucket in found.buckets)
    assert all(count >= 2 for step, count in numbers.items() if step > 0), numbers
    backward = {span.step: span for span in found.spans if span.name == "backward"}
    for bucket in found.buckets:
        around = backward[bucket.step]
        times = (around.start, bucket.ready, bucket.launched, bucket.done, around.stop)
        assert [*times] == sorted(times)
    for step in steps:
        of_step = {s.name: s for s in found.spans if s.step == step and s.name != "wait"}
        ends = [time for name in ORDER for time in of_step[name][1:3]]
        assert ends == sorted(ends)
    check_nested([(s.start, s.stop) for s in found.spans if s.thread == 0])


ORDER = ("data", "forward", "backward", "optimizer")


def check_nested(times: list[tuple[int, int]]) -> None:
    """No span begins inside of another one and ends after it."""
    open_until: list[int] = []
    for start, stop in sorted(times, key=lambda each: (each[0], -each[1])):
        while open_until and open_until[-1] <= start:
            open_until.pop()
        assert not open_until or stop <= open_until[-1]
        open_until.append(stop)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_every_span_of_every_rank_is_there(tmp_path: Path, num_ranks: int) -> None:
    if num_ranks == 1:
        with lockstep.trace(tmp_path):
            num_buckets(lockstep.init(device="cpu"))
        [found] = read_folder(tmp_path)
        assert {s.name for s in found.spans} == {*ORDER}
        assert not found.buckets
        return
    lockstep.launch(traced_threads, num_ranks, (tmp_path,), ranks="threads")
    ranks = read_folder(tmp_path)
    assert [found.rank for found in ranks] == [*range(num_ranks)]
    for found in ranks:
        check_complete(found)
        names = [
            n for facts in found.bucket_facts.values() for n in facts["parameters"].split(", ")
        ]
        assert {*names} == {f"{i}.{kind}" for i in range(6) for kind in ("weight", "bias")}
        assert any(s.name == "wait" and s.detail == "all_reduce" for s in found.spans)
    assert spans.recorder is None


@pytest.mark.parametrize("loader", ["ours", pytest.param("torch", marks=pytest.mark.long)])
def test_the_command_traces_a_script(tmp_path: Path, script: Path, loader: str) -> None:
    folder = tmp_path / "trace"
    done = run(script, folder, loader)
    assert done.returncode == 0, done.stderr
    for found in read_folder(folder):
        check_complete(found)
        assert found.facts["world_size"] == 2
    events = json.loads((folder / "trace.json").read_text())
    complete = [event for event in events if event["ph"] == "X"]
    assert {event["pid"] for event in complete} == {0, 1}
    assert all(event["dur"] >= 0 for event in complete)
    by_track: dict[Any, list[tuple[int, int]]] = {}
    for event in complete:
        track = by_track.setdefault((event["pid"], event["tid"]), [])
        track.append((round(event["ts"] * 1e3), round((event["ts"] + event["dur"]) * 1e3)))
    for times in by_track.values():
        check_nested(times)
    # Perfetto takes thread 0 for the one with the number of the process.
    names = {(e["pid"], e["tid"]): e["args"] for e in events if e["name"] == "thread_name"}
    assert names.keys() >= by_track.keys()
    assert {key for key, args in names.items() if args["name"] == "program"} == {(0, 0), (1, 1)}
    assert not {(pid, tid) for pid, tid in names if tid in (0, pid)} - {(0, 0), (1, 1)}


@pytest.mark.long
def test_a_rank_that_is_killed_leaves_its_steps(tmp_path: Path, script: Path) -> None:
    folder = tmp_path / "trace"
    done = run(script, folder, "die")
    assert done.returncode != 0
    [_, killed] = read_folder(folder)
    optimizers = [span.step for span in killed.spans if span.name == "optimizer"]
    assert optimizers == [*range(NUM_STEPS - 1)]
    assert not (folder / "trace.json").exists()
    for rank in range(2):  # as a reader may, afterwards
        write_json(folder, rank)
    assert merge(folder) == folder / "trace.json"


def test_samples_and_memory_of_steps_are_noted(tmp_path: Path) -> None:
    """The first step's memory, and then at most twice a second."""
    lockstep.launch(traced_threads, 3, (tmp_path,), ranks="threads")
    ranks = read_folder(tmp_path)
    for found, num_samples in zip(ranks, (3, 3, 2), strict=True):  # 8 in a global batch
        ends = {end.step: end for end in found.step_ends}
        assert [*ends] == [*range(NUM_STEPS)]
        assert {end.num_samples for end in ends.values()} == {num_samples}
        assert 1e7 < ends[0].memory["resident"] < 1e12
        times = [end.time for end in ends.values() if end.memory]
        assert all(after - before >= 5e8 for before, after in itertools.pairwise(times))
        assert found.facts["cores"] >= 1
        assert found.facts["local_world_size"] == 3
    events = json.loads((tmp_path / "trace.json").read_text())
    memory = [event for event in events if event["ph"] == "C" and event["name"] == "memory"]
    assert {event["pid"] for event in memory} == {0, 1, 2}
    assert memory[0]["args"] == ranks[0].step_ends[0].memory


def test_samples_of_all_batches_of_a_step_count(tmp_path: Path) -> None:
    dataset = TensorDataset(torch.ones(8, 4))
    model, loader = nn.Linear(4, 1), lockstep.DataLoader(dataset, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with lockstep.trace(tmp_path, steps=(1, 2)):
        for number, (x,) in enumerate(loader, 1):
            model(x).sum().backward()
            if number in (1, 4):
                optimizer.step()
    [end] = read_folder(tmp_path)[0].step_ends
    assert (end.step, end.num_samples) == (1, 6)


def test_without_steps_spans_are_written_all_the_same(tmp_path: Path) -> None:
    with lockstep.trace(tmp_path):
        for _ in range(10_100):
            with spans.span("wait"):
                pass
        [path] = tmp_path.glob("*.spans")
        assert path.read_text().count("wait") > 10_000


def test_a_window_of_steps(tmp_path: Path) -> None:
    lockstep.launch(traced_threads, 2, (tmp_path, (2, 4)), ranks="threads")
    for found in read_folder(tmp_path):
        assert {span.step for span in found.spans} == {2, 3}
        check_complete(found, 2, first=2)


def test_files_of_an_earlier_trace_are_replaced(tmp_path: Path) -> None:
    lockstep.launch(traced_threads, 3, (tmp_path,), ranks="threads")
    lockstep.launch(traced_threads, 2, (tmp_path,), ranks="threads")
    assert [found.rank for found in read_folder(tmp_path)] == [0, 1]
    events = json.loads((tmp_path / "trace.json").read_text())
    assert {event["pid"] for event in events} == {0, 1}


def test_nothing_is_done_when_nobody_records() -> None:
    assert spans.span("wait") is spans.span("data")
    assert not hasattr(torch.autograd.backward, "__wrapped__")  # by a trace before


def test_what_is_wrapped_is_put_back(tmp_path: Path) -> None:
    before = torch.autograd.backward, DataLoader.__iter__
    with pytest.raises(ZeroDivisionError), lockstep.trace(tmp_path):
        _ = 1 / (torch.autograd.backward is before[0])
    assert (torch.autograd.backward, DataLoader.__iter__) == before
    assert spans.recorder is None
    assert read_folder(tmp_path)[0].rank == 0


def test_spans_are_ranges_of_torchs_profiler() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> list[str]:
        loader = lockstep.DataLoader(TensorDataset(torch.ones(4)), 2, process_group=group)
        with torch.profiler.profile() as profile:
            assert len([*loader]) == 2
            lockstep.reduce(1.0, "sum", process_group=group)
        return [event.name for event in profile.events()]

    [names] = run_ranks(1, body)
    assert names.count("lockstep: data") == 3


@pytest.mark.parametrize("steps", [3, (3,), (3, 3), (-1, 2), (0.5, 2), "ab"])
def test_steps_that_make_no_sense_are_refused(tmp_path: Path, steps: Any) -> None:
    tracing = lockstep.trace(tmp_path, steps=steps)
    with pytest.raises((ValueError, TypeError), match="two whole numbers"):
        tracing.__enter__()
    assert [*tmp_path.iterdir()] == []


def test_a_trace_in_a_trace_of_the_same_folder_leaves_it_whole(tmp_path: Path) -> None:
    with lockstep.trace(tmp_path):
        lockstep.log({"value": 1.0})
        spans.recorder.end_step(torch.optim.SGD([torch.ones(1)]))  # type: ignore[union-attr]
        second = lockstep.trace(tmp_path)
        with pytest.raises(ValueError, match="is traced already"):
            second.__enter__()
    (found,) = read_folder(tmp_path)
    assert [entry["log"] for entry in found.logged] == [{"value": 1.0}]


def test_a_trace_in_a_trace_is_refused(tmp_path: Path) -> None:
    second = lockstep.trace(tmp_path / "b")
    with lockstep.trace(tmp_path / "a"), pytest.raises(ValueError, match="is traced already"):
        second.__enter__()


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: Any, script: Path) -> Iterator[Any]:
    def call(*words: str) -> str:
        monkeypatch.setattr(launcher, "run_job", lambda job: pytest.fail("it was run"))
        monkeypatch.setattr(sys, "argv", ["lockstep", "run", *words, str(script)])
        with pytest.raises(SystemExit):
            cli.main()
        return str(capsys.readouterr().err)

    return call


def test_bad_options_are_refused(refused: Any, tmp_path: Path) -> None:
    assert "two numbers are needed, as in 10:20" in refused("--trace", "x", "--trace-steps", "5")
    assert "two numbers are needed" in refused("--trace", "x", "--trace-steps", "5:5")
    assert "--trace-steps is for --trace DIR" in refused("--trace-steps", "1:5")
    assert "--baseline is for --trace DIR" in refused("--baseline")
    alone = refused("-n", "1", "--trace", str(tmp_path / "alone"), "--baseline")
    assert "compares several ranks of one host with one" in alone
    (tmp_path / "file").write_text("")
    assert "can't be written to" in refused("--trace", str(tmp_path / "file"))


def test_what_is_no_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="lockstep run --trace"):
        read_folder(tmp_path)
    for text in ("x y z\n", '{"rank": \n', "data 1 2 3 0 \n", "bucket 1 2\n", ""):
        (tmp_path / "rank-0.spans").write_text(text)
        with pytest.raises(TraceError, match="of a trace"):
            read_folder(tmp_path)
    (tmp_path / "rank-0.spans").write_text('{"rank": 0, "host": "h"}\ndata 1 2 0 0  0\ndata 3')
    assert len(read(tmp_path / "rank-0.spans").spans) == 1  # the last line was cut off


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_clocks_that_differ_are_measured(num_ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    true_now = spans.now
    skews = [0, 5_000_000_000, -3_000_000, 777]
    of_thread: dict[int, int] = {}

    def skewed() -> int:
        return true_now() + skews[of_thread[threading.get_ident()]]

    monkeypatch.setattr(clock, "now", skewed)

    def body(rank: int, group: dist.ProcessGroup) -> clock.Offset:
        of_thread[threading.get_ident()] = rank
        return clock.measure_offset(group)

    for rank, found in enumerate(run_ranks(num_ranks, body)):
        assert abs(found.offset + skews[rank]) <= found.bound
        assert found.bound < 100_000_000  # as long as threads take their turns


def test_a_save_is_a_span(tmp_path: Path) -> None:
    with lockstep.trace(tmp_path / "trace"):
        lockstep.save(tmp_path / "run", number=1)
    spans_of_save = [s for s in read_folder(tmp_path / "trace")[0].spans if s.name == "save"]
    assert len(spans_of_save) == 1


def test_times_are_shifted_to_one_clock(tmp_path: Path) -> None:
    path = tmp_path / "rank-1.spans"
    facts = {"rank": 1, "host": "h", "offset": -50}
    path.write_text(json.dumps(facts) + "\ndata 100 200 0 0  0\nbucket 110 120 130 0 0\n")
    found = read(path)
    assert found.spans[0][1:3] == (50, 150)
    assert found.buckets[0][:3] == (60, 70, 80)


def test_a_job_is_traced_by_what_can_be_pickled(tmp_path: Path) -> None:
    job = launcher.Job(launcher.job_of(["-c"], module=True, nprocs="1").program, 1, 1)
    again = pickle.loads(pickle.dumps(traced(job, str(tmp_path / "t"), "1:3")))
    with again.around(0) as steps:
        assert steps.step == 0


def test_lines_that_come_before_the_file_is_emptied_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another rank's thread may step, and so write lines, as soon as a recorder is known."""
    add = tracing._process.add

    def add_and_write(recorder: tracing._RankTrace) -> None:
        add(recorder)
        recorder.write()

    monkeypatch.setattr(tracing._process, "add", add_and_write)
    with lockstep.trace(tmp_path):
        pass
    (found,) = read_folder(tmp_path)
    assert found.rank == 0
