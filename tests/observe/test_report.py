"""``lockstep report``: where the time goes, and which rank is late, in what."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import sys
import time
import zlib
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils.data import DataLoader, Dataset

import lockstep
from lockstep import cli
from lockstep.errors import TraceError
from lockstep.observe import report, sections
from lockstep.observe.analysis import PHASES, Late, late_rank, shares, summary
from lockstep.observe.page import page
from lockstep.observe.predict import parse_network, predict
from lockstep.observe.records import Bucket, LoaderUse, RankSpans, Span, StepEnd
from lockstep.observe.trace_files import read_folder
from lockstep.observe.words import in_words

MS = 1_000_000
PLACES = ("data", "forward", "backward", "collectives")


class Slow:
    """Sleeps where it is told to, on one rank."""

    def __init__(self, place: str, rank: int, seconds: float) -> None:
        self.place, self.rank, self.seconds = place, rank, seconds

    def at(self, place: str, world: lockstep.World) -> None:
        if (place, world.rank) == (self.place, self.rank):
            time.sleep(self.seconds)


class Samples(Dataset[torch.Tensor]):
    def __init__(self, slow: Slow, world: lockstep.World) -> None:
        self.slow, self.world = slow, world

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        if index % 4 == 0:
            self.slow.at("data", self.world)
        return torch.full((8,), float(index))


class Net(nn.Module):
    def __init__(self, slow: Slow, world: lockstep.World) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.slow, self.world = slow, world

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.slow.at("forward", self.world)
        hidden = self.first(x)
        hidden.register_hook(lambda _: self.slow.at("backward", self.world))
        return self.second(hidden)  # type: ignore[no-any-return]


def train(world: lockstep.World, folder: Path, slow: Slow) -> None:
    def hook(state: object, bucket: Any) -> Any:
        slow.at("collectives", world)
        return allreduce_hook(world.process_group, bucket)  # type: ignore[arg-type]

    net = Net(slow, world)
    model = lockstep.DistributedDataParallel(net, process_group=world.process_group)
    if slow.place == "collectives":
        model.register_comm_hook(None, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    # torch's, as ranks that are threads take turns in reading with ours.
    loader = DataLoader(Samples(slow, world), 4)
    with lockstep.trace(folder):
        for x in loader:
            lockstep.mean(model(x).square(), process_group=world.process_group).backward()
            optimizer.step()
            optimizer.zero_grad()


def check_named(folder: Path, place: str, num_ranks: int, rank: int, seconds: float) -> None:
    slow = Slow(place, rank, seconds)
    lockstep.launch(train, num_ranks, (folder, slow), ranks="threads")
    ranks = read_folder(folder)
    steps = shares(ranks)
    late = late_rank(steps)
    assert late is not None
    assert (late.rank, late.phase) == (rank, place)
    assert f"wait for rank {rank} " in in_words(summary(ranks, steps))


@pytest.mark.parametrize("place", PLACES)
def test_a_rank_that_is_slow_is_named(tmp_path: Path, place: str) -> None:
    check_named(tmp_path, place, 3, 1, 0.06)


@pytest.mark.long
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize(
    ("rank", "seconds"), [(0, 0.05), (0, 0.1), (1, 0.05), (1, 0.08), (-1, 0.2)]
)
def test_a_slow_rank_is_named_in_60_cases(
    tmp_path: Path, place: str, num_ranks: int, rank: int, seconds: float
) -> None:
    check_named(tmp_path, place, num_ranks, rank % num_ranks, seconds)


def train_sharded(world: lockstep.World, folder: Path) -> None:
    model = lockstep.parallelize(nn.Linear(8, 8))
    optimizer = lockstep.shard_optimizer(torch.optim.SGD(model.parameters(), lr=1e-6))
    with lockstep.trace(folder):
        for _ in range(5):
            loss = lockstep.mean(model(torch.ones(2, 8)).square())
            loss.backward()
            if world.rank == 1:
                time.sleep(0.05)
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.forks
def test_a_rank_that_is_late_at_a_sharded_optimizers_step_is_named(tmp_path: Path) -> None:
    lockstep.launch(train_sharded, 2, (tmp_path,))
    ranks = read_folder(tmp_path)
    late = late_rank(shares(ranks))
    assert late is not None
    # Between backward and step there is only the program's own code.
    assert (late.rank, late.phase) == (1, "other")
    assert "wait for rank 1 " in in_words(summary(ranks, shares(ranks)))


def rank_of(rank: int, comes: list[int], leaves: list[int], *, data: int = 1) -> RankSpans:
    """A rank whose steps have ``data`` ms of data, and one wait; times in ms."""
    spans, now = [], 0
    for step, (start, stop) in enumerate(zip(comes, leaves, strict=True)):
        words = [("data", now, now + data), ("forward", now + data, now + data + 1)]
        words += [("backward", now + data + 1, stop), ("wait", start, stop)]
        words += [("optimizer", stop, stop + 1)]
        spans += [
            Span(name, begin * MS, end * MS, step, 0, "all_reduce" * (name == "wait"), 100)
            for name, begin, end in words
        ]
        now = stop + 1
    times = enumerate(zip(comes, leaves, strict=True))
    buckets = [Bucket((c - 1) * MS, (c - 1) * MS, s * MS, step, 0) for step, (c, s) in times]
    return RankSpans(rank, {"host": "h"}, spans, buckets, [], {0: {"bytes": 100}})


def test_times_are_added_up_exactly() -> None:
    # Step 1 begins at 11; rank 1 comes 4 ms later, and its sum takes 1 ms.
    ranks = [rank_of(0, [5, 15], [10, 20]), rank_of(1, [9, 19], [10, 20])]
    early, late = shares(ranks)[1]
    assert early.own == {
        **dict.fromkeys(PHASES, 0),
        "data": MS,
        "forward": MS,
        "backward": 2 * MS,
        "optimizer": MS,
    }
    assert early.waits_for == {1: 4 * MS}
    assert (early.transfer, early.hidden, early.total) == (MS, MS, 10 * MS)
    assert late.waits_for == {1: 0}
    assert late.own["backward"] == 6 * MS
    found = late_rank(shares(ranks))
    assert found is not None
    assert (found.rank, found.phase) == (1, "backward")
    assert found.part == pytest.approx(0.4, abs=0.03)


def test_ranks_are_named_by_their_numbers_in_a_trace_that_lacks_some() -> None:
    whole = [rank_of(0, [5, 15], [11, 21]), rank_of(1, [9, 19], [11, 21])]
    part = [found._replace(rank=found.rank + 3) for found in whole]
    assert shares(part)[1][0].waits_for == {4: 4 * MS}
    late = late_rank(shares(part))
    assert late == late_rank(shares(whole))._replace(rank=4)  # type: ignore[union-attr]
    found = sections.waiting(shares(part))
    assert found is not None
    assert found.columns == ("rank", "for rank 4")


@given(waits=st.lists(st.lists(st.integers(0, 50), min_size=3, max_size=3), min_size=2, max_size=6))
def test_every_nanosecond_is_counted_once(waits: list[list[int]]) -> None:
    now, comes, leaves = 0, [[], [], []], []  # type: ignore[var-annotated]
    for delays in waits:
        for rank, delay in enumerate(delays):
            comes[rank].append(now + 3 + delay)
        now += 3 + max(delays) + 2
        leaves.append(now)
        now += 1
    ranks = [rank_of(rank, comes[rank], leaves) for rank in range(3)]
    for together in shares(ranks):
        for share in together:
            assert sum(share.own.values()) + share.waiting + share.transfer == share.total
            assert share.transfer == 2 * MS
            assert all(value >= 0 for value in share.own.values())


def test_the_first_of_several_steps_does_not_count() -> None:
    # It takes 51 ms, in which nearly nothing is sent, and the others 10 ms.
    comes, leaves = [49, 55, 65, 75], [50, 60, 70, 80]
    ranks = [rank_of(rank, comes, leaves) for rank in range(2)]
    found = summary(ranks, shares(ranks))
    assert found.num_steps == 4
    assert found.spread == (0.01, 0.01)
    assert found.transfer == 0.5


def words_of(**changes: Any) -> str:
    ranks = [rank_of(0, [5, 15], [10, 20]), rank_of(1, [5, 15], [10, 20])]
    found = summary(ranks, shares(ranks))._replace(late=None, waiting=0, transfer=0)
    changes["phases"] = {**dict.fromkeys(PHASES, 0.0), **changes.get("phases", {})}
    return in_words(found._replace(**changes))


def test_it_says_what_holds_a_run_back() -> None:
    assert "the ranks wait for data" in words_of(phases={"data": 0.3})
    assert "now for one and now for another" in words_of(waiting=0.3)
    assert "now for one and" in words_of(waiting=0.3, num_ranks_of_host=4, num_cores=4)
    assert "8 ranks share 2 cores" in words_of(waiting=0.3, num_ranks_of_host=8, num_cores=2)
    assert "lockstep.accumulate" in words_of(transfer=0.3, of_gradients=0.2)
    assert "shard_optimizer" in words_of(transfer=0.3, of_gradients=0.2)
    assert "shard_optimizer" not in words_of(transfer=0.3, of_gradients=0.2, is_sharded=True)
    assert "sending gradients" not in words_of(transfer=0.3, of_gradients=0.1)
    unmatched = words_of(transfer=0.3, of_gradients=0.2, num_unmatched=2)
    assert "waited in different operations" in unmatched
    assert "sending gradients" not in unmatched
    assert "outside of loader" in words_of(phases={"other": 0.3})
    assert "goes into evaluations" in words_of(phases={"evaluation": 0.3, "data": 0.2})
    assert "90% of the time is spent in forward" in words_of(phases={"backward": 0.9})


def of_loader(**changes: Any) -> str:
    use = LoaderUse(0, "Digits", 2, False, True, 4, 4.0, 400, 40.0)._replace(**changes)
    return words_of(phases={"data": 0.3}, loader=use, num_ranks_of_host=2, num_cores=8)


def test_advice_about_data_is_about_the_loader_that_there_is() -> None:
    assert "Digits has no workers: give it some (num_workers)" in of_loader(workers=0)
    has_workers = of_loader()
    assert "Digits has 2 workers on each rank: give it more" in has_workers
    assert "num_workers" not in has_workers
    # 4 batches of 420 take ten times as long as the others.
    assert "persistent_workers" not in has_workers
    slow = {"num_firsts": 40, "firsts": 40.0}
    assert "takes 1.00 s, and another one 100.0 ms: persistent_workers=True" in of_loader(**slow)
    assert "persistent_workers" not in of_loader(**slow, persistent=True)
    assert "persistent_workers" not in of_loader(**slow, workers=0)
    use = LoaderUse(0, "Digits", 2, True, True, 0, 0.0, 400, 40.0)
    shared = words_of(phases={"data": 0.3}, loader=use, num_ranks_of_host=2, num_cores=2)
    assert "2 ranks and 4 workers share 2 cores" in shared
    assert "give it" not in shared


def test_a_phase_is_blamed_only_if_it_takes_as_much_longer() -> None:
    late = Late(1, "backward", 0.3, seconds=0.010, excess=0.004, waited=0.005)
    assert "10.0 ms of a step in the backward, 4.0 ms more" in words_of(late=late)
    unclear = words_of(late=late._replace(excess=0.001))
    assert "wait for rank 1 for 30% of their time" in unclear
    assert "backward" not in unclear


def test_waits_in_different_operations_are_counted() -> None:
    ranks = two_ranks()
    spans = [s._replace(detail="reduce" * (s.name == "wait")) for s in ranks[1].spans]
    found = summary(ranks, shares([ranks[0], ranks[1]._replace(spans=spans)]))
    assert found.num_unmatched == 2
    assert found.waiting == 0


def test_the_command_prints_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    lockstep.launch(train, 2, (tmp_path, Slow("data", 1, 0.05)), ranks="threads")
    (tmp_path / "trace.json").unlink()
    monkeypatch.setattr(sys, "argv", ["lockstep", "report", str(tmp_path)])
    cli.main()
    told = " ".join(capsys.readouterr().out.split())
    assert "wait for rank 1" in told
    assert "6 steps of 2 ranks" in told
    assert json.loads((tmp_path / "trace.json").read_text())
    assert (tmp_path / "report.html").exists()
    (tmp_path / "report.html").unlink()
    monkeypatch.setattr(sys, "argv", ["lockstep", "report", "--text", str(tmp_path)])
    cli.main()
    assert not (tmp_path / "report.html").exists()
    monkeypatch.setattr(sys, "argv", ["lockstep", "report", str(tmp_path / "none")])
    with pytest.raises(SystemExit):
        cli.main()
    assert "There is no trace in" in capsys.readouterr().err


def test_a_trace_without_a_whole_step_is_refused(tmp_path: Path) -> None:
    facts = '{"rank": 0, "host": "h"}\n'
    (tmp_path / "rank-0.spans").write_text(facts + "data 1 2 0 0  0\n")
    with pytest.raises(TraceError, match="no optimizer step"):
        shares(read_folder(tmp_path))


def test_one_rank_is_never_late() -> None:
    ranks = [rank_of(0, [5, 15], [10, 20])]
    assert late_rank(shares(ranks)) is None


def drawn_in(html: str) -> dict[str, Any]:
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', html, re.S)
    found: dict[str, Any] = json.loads(text)
    return found


def unpacked(text: str) -> list[int]:
    numbers = array("i")
    numbers.frombytes(zlib.decompress(base64.b64decode(text)))
    return numbers.tolist()


def test_the_page_draws_every_span_of_every_rank(tmp_path: Path) -> None:
    lockstep.launch(train, 2, (tmp_path, Slow("data", 1, 0.01)), ranks="threads")
    report(str(tmp_path))
    html = (tmp_path / "report.html").read_text()
    data, ranks = drawn_in(html), read_folder(tmp_path)
    zero = min(span.start for found in ranks for span in found.spans)
    for found, own in zip(ranks, data["ranks"], strict=True):
        wanted = sorted(
            [(s.start, s.stop, s.name) for s in found.spans]
            + [(b.ready, b.done, "bucket") for b in found.buckets]
            + [(b.launched, b.done, "all-reduce") for b in found.buckets]
        )
        kinds = [data["labels"][number % 16] for number in unpacked(own["kind"])]
        starts, lengths = unpacked(own["start"]), unpacked(own["length"])
        unit = data["unit"] * 1000
        assert sorted(kinds) == sorted(name for _, _, name in wanted)
        for start, length, (first, last, _) in zip(starts, lengths, wanted, strict=True):
            assert abs(start * unit - (first - zero)) < 2 * unit
            assert abs(length * unit - (last - first)) < 2 * unit
    assert len(unpacked(data["steps"]["length"])) == 6
    assert in_words(summary(ranks, shares(ranks))) in html.replace("&#39;", "'")
    assert not re.findall(r"(?:src|href)=|https?://", html)  # it needs nothing else


def test_a_page_may_have_any_names_in_it() -> None:
    ranks = [rank_of(0, [5, 15], [10, 20]), rank_of(1, [5, 15], [10, 20])]
    bad = "</script><b>&"
    facts = {0: {"bytes": 100, "parameters": [bad], "index": 0}}
    entry = {"step": 1, "time": 12 * MS, "log": {bad: 0.5}}
    ranks[0] = ranks[0]._replace(bucket_facts=facts, logged=[entry])
    html = page(bad, bad, bad, ranks, shares(ranks), (("rank",), [["0"]]))
    assert html.count("</script>") == 2
    assert "<b>" not in html
    assert drawn_in(html)["logged"] == {bad: [[1, 0.5]]}


def with_ends(ranks: list[RankSpans], *samples: int) -> list[RankSpans]:
    """Let each rank note, at the ends of its two steps, these samples and some memory."""
    ends = [
        [
            StepEnd(step, 0, number, {"resident": (100 + 10 * rank + step) * 10**6})
            for step, number in enumerate(samples)
        ]
        for rank in range(len(ranks))
    ]
    return [r._replace(step_ends=own) for r, own in zip(ranks, ends, strict=True)]


def two_ranks() -> list[RankSpans]:
    """Steps of 11 and 10 ms; rank 1 comes 4 ms later."""
    return [rank_of(0, [5, 15], [10, 20]), rank_of(1, [9, 19], [10, 20])]


def test_throughput_is_of_all_ranks_together() -> None:
    ranks = with_ends(two_ranks(), 5, 6)
    steps = shares(ranks)
    found = sections.rate(ranks, steps)
    assert found.unit == "samples/s"
    assert found.by_step == [(0, pytest.approx(10 / 0.011)), (1, pytest.approx(12 / 0.010))]
    assert found.mean == pytest.approx(22 / 0.021)
    assert found.mean == pytest.approx(11 / summary(ranks, steps).seconds_per_step)
    assert sections.global_batch(ranks) == 12
    section = sections.throughput(found)
    assert section.curves == {"samples/s": found.by_step}
    assert "909.1 to 1,200.0 in single steps" in section.note


def test_throughput_is_in_steps_if_samples_are_not_known() -> None:
    for ranks in (two_ranks(), with_ends(two_ranks(), 5, 0)):
        found = sections.rate(ranks, shares(ranks))
        assert found.unit == "steps/s"
        assert found.by_step == [(0, pytest.approx(1 / 0.011)), (1, pytest.approx(100))]
    assert sections.global_batch(two_ranks()) is None


def test_a_long_curve_has_means_of_several_steps() -> None:
    ends = [10 * step + 10 for step in range(1200)]
    ranks = [rank_of(0, [end - 5 for end in ends], ends)]
    points = sections.rate(ranks, shares(ranks)).by_step
    assert [step for step, _ in points] == [*range(0, 1200, 3)]
    assert points[1][1] == pytest.approx(100)


def test_who_waits_for_whom() -> None:
    section = sections.waiting(shares(two_ranks()))
    assert section is not None
    assert section.columns == ("rank", "for rank 1")
    assert section.rows == [["0", "4.00"], ["1", "-"]]
    # Rank 1 is late in the first step, and rank 0 in the second.
    ranks = [rank_of(0, [5, 18], [10, 20]), rank_of(1, [9, 15], [10, 20])]
    section = sections.waiting(shares(ranks))
    assert section is not None
    assert section.columns == ("rank", "for rank 0", "for rank 1")
    assert section.rows == [["0", "-", "2.00"], ["1", "1.50", "-"]]
    assert sections.waiting(shares(ranks[:1])) is None


def test_the_ranks_that_are_waited_for_longest_are_shown() -> None:
    # Of 10 ranks each is late in one step, by 1 to 10 ms.
    ends = [(step + 1) * 30 for step in range(10)]
    ranks = [
        rank_of(r, [end - 15 + (r + 1) * (r == n) for n, end in enumerate(ends)], ends)
        for r in range(10)
    ]
    section = sections.waiting(shares(ranks))
    assert section is not None
    assert section.columns == ("rank", *(f"for rank {r}" for r in range(2, 10)))
    assert "the 8 ranks" in section.note
    assert len(section.rows) == 10


def test_memory_of_each_rank_is_shown() -> None:
    section = sections.memory(with_ends(two_ranks(), 1, 1))
    assert section is not None
    assert section.rows == [["0", "101.0"], ["1", "111.0"]]
    assert section.curves == {
        "rank 0": [(0, 100.0), (1, 101.0)],
        "rank 1": [(0, 110.0), (1, 111.0)],
    }
    assert sections.memory(two_ranks()) is None
    memory = {"resident": 5 * 10**6, "device": 10**6, "device_peak": 2 * 10**6}
    [rank] = with_ends(two_ranks()[:1], 1)
    section = sections.memory([rank._replace(step_ends=[StepEnd(0, 0, 1, memory)])])
    assert section is not None
    assert section.rows == [["0", "5.0", "1.0", "2.0"]]
    assert section.curves == {"rank 0": [(0, 1.0)]}


def test_scaling_says_what_it_assumes() -> None:
    ranks = [
        r._replace(facts={"device": "cpu", "cores": 2, "local_world_size": 4}) for r in two_ranks()
    ]
    steps = shares(ranks)
    own = sections.scaling(predict(ranks, steps, None, 64), ranks, 64)
    assert own is not None
    assert [row[0] for row in own.rows[:3]] == ["2 measured", "2", "4"]
    assert own.rows[-1][0] == "1,024"
    assert own.rows[7][-2:] == ["-", "-"]  # 128 ranks, of 64 samples
    assert "-" not in own.rows[6]
    assert "as between the ranks of this run" in own.note
    assert "0.5 cores, as they had: 4 ranks shared 2" in own.note
    assert "of 64 samples among the ranks" in own.note
    given = sections.scaling(predict(ranks, steps, parse_network("10gbe")), ranks, None)
    assert given is not None
    assert "for the given network: 30 us a message and 10 Gbit/s." in given.note
    assert "samples among" not in given.note
    assert sections.scaling(None, ranks, None) is None


def test_the_report_has_all_sections(tmp_path: Path, capsys: Any) -> None:
    lockstep.launch(train, 2, (tmp_path, Slow("data", 1, 0.01)), ranks="threads")
    report(str(tmp_path), network="20,25")
    html, told = (tmp_path / "report.html").read_text(), capsys.readouterr().out
    for title in ("Who waits for whom", "Memory", "Scaling"):
        assert f">{title}</h2>" in html
        assert title in told
    assert ">Throughput</h2>" in html
    assert "steps/s" in told  # torch's loader doesn't tell the samples
    for words in ("20 us a message and 25 Gbit/s", "1,024"):
        assert words in " ".join(told.split())
        assert words in html
    curves = [curve for curve in drawn_in(html)["curves"] if curve]
    assert [[*curve] for curve in curves] == [["steps/s"], ["rank 0", "rank 1"]]
    # Each canvas has a name and a description.
    for found in re.findall(r'<canvas class="curves"[^>]*>', html):
        assert 'role="img"' in found
        for attribute in ("aria-labelledby", "aria-describedby"):
            [name] = re.findall(f'{attribute}="([^"]*)"', found)
            assert f'id="{name}"' in html


def test_a_network_that_is_not_known_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    words = ["lockstep", "report", str(tmp_path), "--network", "fast"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit):
        cli.main()
    assert "--network fast isn't known" in capsys.readouterr().err


@pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium isn't installed")
def test_the_page_runs_in_a_browser(tmp_path: Path) -> None:
    lockstep.launch(train, 2, (tmp_path, Slow("data", 1, 0.01)), ranks="threads")
    report(str(tmp_path))
    options = ("--headless", "--no-sandbox", "--virtual-time-budget=5000", "--dump-dom")
    url = (tmp_path / "report.html").as_uri()
    command = ["chromium", *options, f"--user-data-dir={tmp_path / 'profile'}", url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert 'data-ready="yes"' in done.stdout
    assert re.search(r'id="range"[^>]*>[\d,.]+ ms to [\d,.]+ ms<', done.stdout)


def test_the_page_is_there_although_the_reader_reads_no_further(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lockstep.launch(train, 2, (tmp_path, Slow("data", 1, 0.0)), ranks="threads")

    def fail(*_: object, **options: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(Console, "print", fail)
    with pytest.raises(BrokenPipeError):
        report(str(tmp_path))
    assert (tmp_path / "report.html").exists()
