"""What others may have written of a run: traces, logs, and the memory in which ranks tell of it.

Whatever stands there, a reader reads it or tells what is wrong; it takes no more memory or time
than that is worth, lets no escapes through to the terminal, and writes nowhere else.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import tracemalloc
from argparse import Namespace
from contextlib import closing, nullcontext, suppress
from pathlib import Path

import pytest
import torch

import lockstep
from lockstep.errors import TraceError
from lockstep.launcher import main_stack
from lockstep.launcher.live import Live
from lockstep.observe import attach, logger, report
from lockstep.observe.analysis import step_times
from lockstep.observe.faults import Spool
from lockstep.observe.trace_files import read, read_folder
from lockstep.observe.tracing import _RankTrace
from lockstep.run_status import RunStatus
from tests.counts import NUM_MUTATIONS
from tests.fuzzing import mutated, mutated_json, watched
from tests.memory import growth_of, peak_of

EVIL = "\x1b]0;owned\a\x1b[2J[/nope]</script><script>alert(1)</script>\ud800"
# All but the ends of lines.
_UNPRINTABLE = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def mutations(num_short: int) -> pytest.MarkDecorator:
    """Let ``make test`` try a few, and ``make test-long`` all."""
    return pytest.mark.parametrize(
        "num_mutations", [num_short, pytest.param(NUM_MUTATIONS, marks=pytest.mark.long)]
    )


def train_in_a_trace(world: lockstep.World, folder: Path) -> None:
    group = world.process_group
    model = lockstep.parallelize(torch.nn.Linear(4, 1), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = torch.utils.data.TensorDataset(torch.zeros(16, 4))
    loader = lockstep.DataLoader(data, 4, seed=0, process_group=group)
    with lockstep.trace(folder):
        for (x,) in loader:
            lockstep.mean(model(x).square(), process_group=group).backward()
            optimizer.step()
            lockstep.log(loss=0.5)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trace")
    lockstep.launch(train_in_a_trace, 2, (folder,), ranks="threads")
    return folder


def changed(data: bytes, chance: random.Random) -> bytes:
    """Change bytes, or what a line says that is JSON."""
    lines = data.split(b"\n")
    facts = [index for index, line in enumerate(lines) if line.startswith(b"{")]
    if not facts or chance.random() < 0.5:
        return mutated(data, chance)
    index = chance.choice(facts)
    lines[index] = mutated_json(lines[index], chance)
    return b"\n".join(lines)


@mutations(30)
def test_a_report_of_any_trace_is_read_or_refused(
    num_mutations: int, trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {path.name: path.read_bytes() for path in sorted(trace.glob("rank-*.spans"))}
    folder, num_refused = tmp_path / "trace", 0
    shutil.copytree(trace, folder, ignore=shutil.ignore_patterns("trace.json"))
    for seed in range(num_mutations):
        chance = random.Random(seed)
        hit = chance.choice([*files])
        data = changed(files[hit], chance)
        (folder / hit).write_bytes(data)
        said = ""
        # To find a network takes as long as all the rest.
        network = None if seed % 8 < 2 else "25gbe"
        try:
            with watched(sum(map(len, {**files, hit: data}.values())), writes_in=folder):
                report(str(folder), text=bool(seed % 4), network=network)
        except TraceError as error:
            num_refused += 1
            said = str(error)
        except BaseException as error:
            raise AssertionError(f"seed {seed}: {error!r}") from error
        said += capsys.readouterr().out
        assert not _UNPRINTABLE.search(said), (seed, said)
        made = {path.name for path in folder.iterdir()} - {*files}
        assert made <= {"rank-0.json", "rank-1.json", "trace.json", "report.html"}, (seed, made)
        (folder / "trace.json").unlink(missing_ok=True)
        (folder / hit).write_bytes(files[hit])
    assert num_mutations // 10 < num_refused < num_mutations


def test_reading_takes_at_most_twice_the_file_in_memory(trace: Path, tmp_path: Path) -> None:
    path = tmp_path / "rank-0.spans"
    path.write_bytes((trace / "rank-0.spans").read_bytes() * 80)
    size = path.stat().st_size
    assert size > 100_000  # so that what doesn't grow with it is a small part
    read(path)
    tracemalloc.start(1)
    try:
        found = read(path)
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(found.spans) + len(found.buckets) + len(found.batches) > size // 100
    assert (kept < 1.5 * size, peak < 2 * size) == (True, True), (kept / size, peak / size)


def longer(path: Path, times: int) -> str:
    """Return the spans of a rank that trains so many times as long as in this file."""
    facts, lines = [], []
    for line in path.read_text().splitlines():
        is_facts = line.startswith("{") and not line.startswith(('{"end_of"', '{"step"'))
        (facts if is_facts else lines).append(line)
    last = max(json.loads(line)["end_of"] for line in lines if line.startswith('{"end_of"')) + 1
    length = max(int(line.split(" ")[2]) for line in lines if line.startswith("wait "))

    def later(line: str, number: int) -> str:
        if line.startswith("{"):
            found = json.loads(line)
            found["time"] += number * length
            found["end_of" if "end_of" in found else "step"] += number * last
            return json.dumps(found)
        words = line.split(" ")
        num_times = {"bucket": 3, "batch": 1}.get(words[0], 2)
        for index in range(1, num_times + 1):
            words[index] = str(int(words[index]) + number * length)
        words[num_times + 1] = str(int(words[num_times + 1]) + number * last)
        return " ".join(words)

    return "\n".join([*facts, *(later(line, n) for n in range(times) for line in lines), ""])


@pytest.mark.long
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_report_takes_at_most_twice_the_trace_in_memory(
    num_ranks: int, trace: Path, tmp_path: Path
) -> None:
    def make(times: int) -> int:
        for rank in range(num_ranks):
            name = f"rank-{rank}.spans"
            (tmp_path / name).write_text(longer(trace / name, times))
        (tmp_path / "trace.json").unlink(missing_ok=True)
        return sum(path.stat().st_size for path in tmp_path.glob("*.spans"))

    peak, size = growth_of(lambda: report(str(tmp_path)), make)
    assert size > 100_000
    assert peak < 2 * size, peak / size


# What ends a step after those of the trace.
STEP_4 = b'optimizer %d %d 4 0  0\n{"end_of":4,"time":%d}\n' % (1 << 59, (1 << 59) + 5, 1 << 59)


BUCKET = b'{"bucket":0,"bytes":1,"index":0,"hooked":false,"deferred":false,"parameters":["%s"]}\n'


def _crafted(kind: str, number: int) -> bytes:
    """Lines of which each takes as much memory as its kind can."""
    wide = ("\U0001f600" + 50_000 * "a").encode()  # four bytes a character
    return {
        "wide names of a bucket": BUCKET % wide * (number // 300),
        "wide loaders": b"".join(
            b'{"loader":%d,"dataset":"%s","workers":0,"persistent":true}\n' % (n, wide)
            for n in range(number // 300)
        ),
        "wide names of values": b"".join(
            b'{"log":{"%d%s":1},"step":1,"time":1}\n' % (n, wide) for n in range(number // 300)
        ),
        "lists": b'{"a":[' + b"[]," * 10 * number + b"[]]}\n",
        "names": b"".join(b"%x 1 1 0 0  0\n" % n for n in range(number)),
        "names of values": b"".join(
            b'{"log":{"%d":1},"step":1,"time":1}\n' % n for n in range(number)
        ),
        "steps": b"".join(
            b"wait 1 1 %d 0 a 0\nbatch 1 %d 0 0 1 1\n" % (n, n) for n in range(number)
        ),
        "buckets": b"".join(b"bucket 1 1 1 0 %d\n" % n for n in range(number)),
        "names of a bucket": (BUCKET % b"layer" + BUCKET % b"") * number + BUCKET % b"last",
        "loaders": b"".join(
            b'{"loader":%d,"dataset":"%d","workers":0,"persistent":true}\n' % (n, n)
            for n in range(number)
        ),
        "iterations": b"".join(b"batch %d 1 0 %d 1 1\n" % (n, n) for n in range(number)),
        "threads": b"".join(b"data %d %d 1 %d  0\n" % (n, n + 1, n) for n in range(number)),
        "wide columns": b"a 0 %d %d %d  %d\n" % (*[1 << 50] * 4,) + b"a 0 0 0 0  0\n" * number,
        "spans of a step": b"".join(
            b"wait %d %d 4 0 a 0\n" % (n, n + 1) for n in range(1 << 58, (1 << 58) + number)
        )
        + STEP_4,
        "open spans": b"".join(
            b"forward %d %d 4 0  0\n" % ((1 << 58) + n, (1 << 59) - n) for n in range(number)
        )
        + STEP_4,
        "buckets of a step": b"".join(
            b"bucket %d %d %d 4 0\n" % (n, n, n + 2)
            for n in range(1 << 58, (1 << 58) + 3 * number, 3)
        )
        + STEP_4,
    }[kind]


FEW_NAMES = ["lists", "names of values", "loaders", "iterations", "wide columns"]
MANY_SPANS = [
    *("names", "buckets", "threads"),
    *("wide names of a bucket", "wide loaders", "wide names of values"),
]
# A minute each, and much like threads.
OF_STEPS = ["steps", "spans of a step", "open spans", "buckets of a step"]


@pytest.mark.parametrize(
    ("kind", "number"),
    [
        *((kind, 4_000) for kind in FEW_NAMES),
        *(pytest.param(kind, 30_000, marks=pytest.mark.long) for kind in FEW_NAMES + MANY_SPANS),
        *(pytest.param(kind, 30_000, marks=pytest.mark.thorough) for kind in OF_STEPS),
    ],
)
def test_crafted_lines_take_no_more_memory_than_others(
    kind: str, number: int, trace: Path, tmp_path: Path
) -> None:
    for name in ("rank-0.spans", "rank-1.spans"):
        (tmp_path / name).write_bytes((trace / name).read_bytes() + _crafted(kind, number))
    (tmp_path / "trace.json").write_text("[\n{}\n]\n")
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    report(str(trace))  # so that what it caches is there

    def read() -> None:
        with suppress(TraceError):
            report(str(tmp_path))

    peak = peak_of(read)
    assert peak < 2 * size + (6 << 20), (peak / size, peak)


def test_what_a_large_model_writes_is_read(tmp_path: Path) -> None:
    names = [*(f"layers.{n}.weight" for n in range(60_000)), "\u4f60" * 50_000]

    class LargeBucket:
        num_bytes, is_hooked, is_deferred = 8, False, False
        contents = Namespace(parameter_names=names)

    with closing(Spool(tmp_path / "rank-0.spans", "", "")) as spool:
        rank = _RankTrace(spool, 0, None)
        rank.start()
        rank.bucket(LargeBucket(), 0, (1, 2, 3))
        rank.log({f"loss/{n}": 0.5 for n in range(30_000)})
        rank.write()
    found = read(tmp_path / "rank-0.spans")
    names[-1] = names[-1][:8192]
    assert found.bucket_facts[0]["parameters"] == ", ".join(names)
    assert sum(len(entry["log"]) for entry in found.logged) == 30_000


def test_numbers_beyond_those_of_machines_are_damage(trace: Path, tmp_path: Path) -> None:
    path = tmp_path / "rank-0.spans"
    path.write_bytes(
        (trace / "rank-0.spans").read_bytes()
        + b"".join(b"batch %d 3 1 0 %d 1\n" % (time, (1 << 53) - 2) for time in range(1200))
    )
    with pytest.raises(TraceError, match=r"isn't of a trace: .*too (large|big)"):
        read(path)


def test_a_damaged_line_is_named(trace: Path, tmp_path: Path) -> None:
    lines = (trace / "rank-0.spans").read_bytes().split(b"\n")
    path = tmp_path / "rank-0.spans"
    for line, what in (
        (b"data 5 1 0 0  0", "ends before it begins"),
        (b"data 1 2 0 0 0", "it has 6 words"),
        (b"data 1 2 0 0 0 x", "invalid literal"),
        (b"bucket 1 2 3 4", "it has 4 numbers"),
        (b"batch 1 -2 3 4 5 6", "-2 is where a count belongs"),
        (b'{"end_of": true, "time": 3}', "'end_of' is True"),
        (b'{"log": {"loss": "x"}, "step": 0, "time": 0}', "'log' is {'loss': 'x'}"),
        (b'{"bucket": 0, "bytes": 8}', "'parameters' is missing"),
        (b'{"rank": {}}', "'rank' is {}"),
        (b"bucket 1 2 3 4 8192", "number 8192, and a rank tells 8,192 apart"),
        (b"batch 1 2 3 1024 5 1", "number 1024, and a rank tells 1,024 apart"),
        (b'{"a":' + b"[" * 100_000, "nested too deeply"),
        (b"x" * (5 << 20), "longer than 256 KiB"),
        (b"\xff\xfe", "can't decode"),
    ):
        path.write_bytes(b"\n".join([*lines[:2], line, *lines[2:]]))
        with pytest.raises(TraceError, match=re.escape(what)) as error:
            read(path)
        assert f"{path}, line 3" in str(error.value)
    path.write_bytes(b"\n".join(lines))
    path.rename(tmp_path / "rank-7.spans")
    with pytest.raises(TraceError, match="it is of rank 0"):
        read(tmp_path / "rank-7.spans")


def test_a_step_that_ends_before_it_begins_is_left_out(trace: Path, tmp_path: Path) -> None:
    folder = tmp_path / "trace"
    shutil.copytree(trace, folder)
    words = (folder / "rank-0.spans").read_text().split("\n")
    ends = [index for index, line in enumerate(words) if line.startswith("optimizer ")]
    before = words[ends[0]].split(" ")
    words[ends[2]] = " ".join([*before[:3], "2", *before[4:]])
    (folder / "rank-0.spans").write_text("\n".join(words))
    ranks = read_folder(folder)
    assert [together[0].step for together in step_times(ranks)] == [0, 1, 3]
    report(str(folder))


def _put(kind: str, path: Path) -> None:
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    elif kind == "huge":
        with open(path, "w") as file:
            file.truncate(1 << 42)
    elif kind == "larger than memory":
        with open(path, "w") as file:
            file.write('{"rank": 0, "host": "h"}\n')
            file.truncate(1 << 42)
    else:
        path.symlink_to(path)


@pytest.mark.parametrize(
    "kind", ["pipe", "device", "folder", "huge", "larger than memory", "circle"]
)
@pytest.mark.parametrize("name", ["rank-0.spans", "rank-1.json"])
def test_what_is_no_file_is_refused_by_its_name(
    kind: str, name: str, trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "trace"
    shutil.copytree(trace, folder)
    (folder / "trace.json").unlink()
    _put(kind, folder / name)
    # The JSON is made anew, where that can be done.
    is_refused = name == "rank-0.spans" or kind == "folder"
    with (
        watched(1 << 20, writes_in=folder),
        pytest.raises(TraceError, match=str(folder)) if is_refused else nullcontext(),
    ):
        report(str(folder), text=True)


def test_names_reach_no_terminal_or_page_as_they_are(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "\x1b[2J[/nope]"
    folder.mkdir(parents=True)
    names = {"host", "dataset", "parameters", "device"}
    for path in trace.glob("rank-*.spans"):
        lines = []
        for line in path.read_text().splitlines():
            facts = json.loads(line) if line.startswith("{") else None
            if facts is not None:
                facts |= {n: [EVIL] if n == "parameters" else EVIL for n in names & facts.keys()}
                if "log" in facts:
                    facts["log"] = {EVIL: 0.5}
                line = json.dumps(facts)
            elif line.startswith("wait "):
                words = line.split(" ")
                words[5] = EVIL.replace("\ud800", "")
                line = " ".join(words)
            lines.append(line)
        (folder / path.name).write_text("\n".join(lines) + "\n")
    report(str(folder))
    said = capsys.readouterr().out
    assert not _UNPRINTABLE.search(said)
    assert r"\x1b" in said
    assert "[/nope]" in said
    page = (folder / "report.html").read_text()
    assert "alert(1)" in page
    assert "<script>alert" not in page
    assert not _UNPRINTABLE.search(page)
    assert not _UNPRINTABLE.search((folder / "trace.json").read_text())


@mutations(25)
def test_any_memory_of_ranks_is_shown(
    num_mutations: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By 'lockstep status', and below the output of 'lockstep run'."""
    monkeypatch.setattr(attach, "_OBSERVED_SECONDS", 0.0)
    monkeypatch.setattr(attach, "dump", lambda rank: f'  File "{EVIL}", line 3 in x\n')
    run = RunStatus.create(f"train.py {EVIL}"[:400], 2)
    for number, rank in enumerate(run.ranks):
        rank.begin(number)
        rank.enter("wait", "all_reduce[/nope]\x1b[2J")
        rank.log(3, 9, {"loss": 0.5, EVIL: 1.0})
    monkeypatch.setattr(attach, "running", lambda: iter([run]))
    monkeypatch.setattr(RunStatus, "refresh", lambda _: None, raising=False)
    whole = bytes(run._memory)
    for seed in range(num_mutations):
        chance = random.Random(seed)
        at = chance.randrange(0, len(whole), 4096)
        page = mutated(whole[at : at + 4096].rstrip(b"\0") or b"\0", chance)[:4096]
        run._memory[:] = whole
        if seed:
            run._memory[at : at + 4096] = page.ljust(4096, b"\0")
        try:
            with watched(len(whole)):
                if run.facts:
                    attach.status(stacks=True)
                live = Live(run, 2)
                live.due = 0
                drawn = live.draw(80, 24) + live.close()
        except BaseException as error:
            raise AssertionError(f"seed {seed}: {error!r}") from error
        said = capsys.readouterr().out
        assert not _UNPRINTABLE.search(said), (seed, said)
        assert b"\x1b]0" not in drawn, seed
        assert b"\x1b[2J" not in drawn, seed
        assert b"\x07" not in drawn, seed


DUMP = b"""Thread 0x00007f0a (most recent call first):
  File "/usr/lib/python3/threading.py", line 1002 in _bootstrap

Current thread 0x00007f0b (most recent call first):
  File "/home/me/train.py", line 12 in step
  File "/home/me/train.py", line 40 in <module>
  File "/usr/lib/python3/runpy.py", line 88 in _run_code
"""


@mutations(300)
def test_any_dump_of_stacks_is_shown(num_mutations: int) -> None:
    for seed in range(num_mutations):
        text = mutated(DUMP, random.Random(seed)).decode(errors="replace")
        with watched(len(text)):
            for frame in main_stack(text):
                assert not _UNPRINTABLE.search(str(frame)), seed


def test_a_number_of_thousands_of_digits_is_no_line_and_no_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    digits = "9" * 5000
    text = DUMP.decode().replace("line 40 ", f"line {digits} ")
    assert [frame.line for frame in main_stack(text)] == [12, 88]
    assert main_stack('  File "", line 3 in x\n') == []  # no name is no place either
    run = RunStatus.create("train.py", 1)
    facts = bytes(run._memory[:200]).split(b"\0")[0]
    changed = re.sub(rb'"at": \d+', b'"at": 1' + b"0" * 400, facts)
    run._memory[: len(changed)] = changed
    assert run.facts == {}


@mutations(60)
def test_any_log_is_continued_or_told_of(
    num_mutations: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = "step,loss,lr\n" + "".join(f'{step},0.5,"1e-3"\n' for step in range(20))
    monkeypatch.setattr(logger, "_logger", logger._Logger())
    path = tmp_path / "logs" / "log.csv"
    path.parent.mkdir()
    for seed in range(num_mutations):
        data = mutated(rows.encode(), random.Random(seed))
        path.write_bytes(data)
        with watched(len(data), writes_in=tmp_path):
            lockstep.log_to(path, lines=False)
            lockstep.log({"loss": 0.5, "new": 1.0}, step=20)
            lockstep.log_to(lines=False)
        assert {each.name for each in path.parent.iterdir()} == {"log.csv"}
