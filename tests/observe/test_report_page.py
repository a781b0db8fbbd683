"""The page of ``lockstep report``, and its sections."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import sys
import zlib
from array import array
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import lockstep
from lockstep import cli
from lockstep.observe import report, sections
from lockstep.observe.analysis import step_times
from lockstep.observe.ladder import ladder
from lockstep.observe.page import page
from lockstep.observe.predict import parse_network, predict
from lockstep.observe.records import RankSpans, Span, StepEnd
from lockstep.observe.summary import summary
from lockstep.observe.trace_files import read_folder
from lockstep.observe.words import in_words
from tests.observe.traced import MS, Slow, rank_of, train_slowly, two_ranks


def drawn_in(html: str) -> dict[str, Any]:
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', html, re.S)
    found: dict[str, Any] = json.loads(text)
    return found


def unpacked(text: str) -> list[int]:
    numbers = array("i")
    numbers.frombytes(zlib.decompress(base64.b64decode(text)))
    return numbers.tolist()


def test_the_page_draws_every_span_of_every_rank(tmp_path: Path) -> None:
    lockstep.launch(train_slowly, 2, (tmp_path, Slow("data", 1, 0.01)), ranks="threads")
    report(str(tmp_path))
    html = (tmp_path / "report.html").read_text()
    data, ranks = drawn_in(html), read_folder(tmp_path)
    zero = min(span.start for found in ranks for span in found.spans)
    for found, columns in zip(ranks, data["ranks"], strict=True):
        wanted = sorted(
            [(s.start, -s.stop, s.name) for s in found.spans]
            + [(b.ready, -b.done, "bucket") for b in found.buckets]
            + [(b.launched, -b.done, "all-reduce") for b in found.buckets]
        )
        kinds = [data["labels"][number % 16] for number in unpacked(columns["kind"])]
        starts, lengths = unpacked(columns["start"]), unpacked(columns["length"])
        unit = data["unit"] * 1000
        assert sorted(kinds) == sorted(name for _, _, name in wanted)
        for start, length, (first, last, _) in zip(starts, lengths, wanted, strict=True):
            assert abs(start * unit - (first - zero)) < 2 * unit
            assert abs(length * unit - (-last - first)) < 2 * unit
        texts = [data["names"][number] for number in unpacked(columns["text"])]
        of = {(kind, text) for kind, text in zip(kinds, texts, strict=True) if text}
        gradients = found.bucket_facts[0]["parameters"]
        assert of >= {("data", "Samples"), ("wait", "all_reduce"), ("all-reduce", gradients)}
        # Of each step its start and its end on this rank: the n-th waits of all ranks are matched.
        ends = unpacked(columns["steps"])
        assert len(ends) == 12
        assert ends[1:-1:2] == ends[2::2]
    assert unpacked(data["steps"]["matched"]) == [1] * 6
    assert unpacked(data["steps"]["number"]) == [*range(6)]
    assert len(unpacked(data["steps"]["length"])) == 6
    assert in_words(summary(ranks, step_times(ranks))) in html.replace("&#39;", "'")
    assert not re.findall(r"(?:src|href)=|https?://", html)  # it needs nothing else


def test_a_page_may_have_any_names_in_it() -> None:
    ranks = [rank_of(0, [5, 15], [10, 20]), rank_of(1, [5, 15], [10, 20])]
    bad = "</script><b>&"
    facts = {0: {"bytes": 100, "parameters": bad, "index": 0}}
    entry = {"step": 1, "time": 12 * MS, "log": {bad: 0.5}}
    ranks[0] = ranks[0]._replace(bucket_facts=facts, logged=[entry])
    steps = step_times(ranks)
    html = "".join(page(bad, bad, bad, ranks, steps, ladder(ranks, steps, None), bad))
    assert html.count("</script>") == 2
    assert "<b>" not in html
    assert drawn_in(html)["logged"] == {bad: [[1, 0.5]]}


def test_evaluations_are_drawn_by_themselves() -> None:
    [rank] = two_ranks()[:1]
    spans = [
        Span("evaluation", 21 * MS, 26 * MS, 2, 0, "", 0),
        Span("data", 21 * MS, 22 * MS, 2, 0, "0", 0),
        Span("data", 26 * MS, 27 * MS, 2, 0, "0", 0),
    ]
    rank = rank._replace(spans=[*rank.spans, *spans], loaders={0: {"dataset": "Digits"}})
    rank = rank._replace(bucket_facts={0: {"bytes": 100, "parameters": "weight"}})
    steps = step_times([rank])
    html = "".join(page("", "", "", [rank], steps, ladder([rank], steps, None)))
    [columns] = drawn_in(html)["ranks"]
    labels = drawn_in(html)["labels"]
    kinds = [(labels[k % 16], k // 16) for k in unpacked(columns["kind"])]
    assert kinds[-3:] == [("evaluation", 0), ("data", 1), ("data", 0)]


def test_steps_whose_operators_were_recorded_are_drawn_apart() -> None:
    facts = {"operators": [["forward", "aten::mm", 1, 1]], "first": 2, "profiled": 2}
    rank = rank_of(0, [5, 15, 25, 35, 45, 55], [10, 20, 30, 40, 50, 60])
    for facts_of_rank, apart in ((facts, [0, 0, 1, 1, 1, 0]), ({}, [0] * 6)):
        ranks = [rank._replace(facts={"host": "h"} | facts_of_rank)]
        steps = step_times(ranks)
        html = "".join(page("", "", "", ranks, steps, ladder(ranks, steps, None)))
        assert unpacked(drawn_in(html)["steps"]["profiled"]) == apart
        assert ("Gray are steps" in html) == any(apart)


def with_ends(ranks: list[RankSpans], *samples: int) -> list[RankSpans]:
    """Let each rank note, at the ends of its two steps, these samples and some memory."""
    ends = [
        [
            StepEnd(step, 0, number, {"resident": (100 + 10 * rank + step) * 10**6})
            for step, number in enumerate(samples)
        ]
        for rank in range(len(ranks))
    ]
    return [r._replace(step_ends=local) for r, local in zip(ranks, ends, strict=True)]


def test_throughput_is_of_all_ranks_together() -> None:
    ranks = with_ends(two_ranks(), 5, 6)
    steps = step_times(ranks)
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
        found = sections.rate(ranks, step_times(ranks))
        assert found.unit == "steps/s"
        assert found.by_step == [(0, pytest.approx(1 / 0.011)), (1, pytest.approx(100))]
    assert sections.global_batch(two_ranks()) is None


def test_a_long_curve_has_means_of_several_steps() -> None:
    ends = [10 * step + 10 for step in range(1200)]
    ranks = [rank_of(0, [end - 5 for end in ends], ends)]
    points = sections.rate(ranks, step_times(ranks)).by_step
    assert [step for step, _ in points] == [*range(0, 1200, 3)]
    assert points[1][1] == pytest.approx(100)


def test_who_waits_for_whom() -> None:
    section = sections.waiting(step_times(two_ranks()))
    assert section is not None
    assert section.columns == ("rank", "for rank 1")
    assert section.rows == [["0", "4.00"], ["1", "-"]]
    # Rank 1 is late in the first step, and rank 0 in the second.
    ranks = [rank_of(0, [5, 18], [10, 20]), rank_of(1, [9, 15], [10, 20])]
    section = sections.waiting(step_times(ranks))
    assert section is not None
    assert section.columns == ("rank", "for rank 0", "for rank 1")
    assert section.rows == [["0", "-", "2.00"], ["1", "1.50", "-"]]
    assert sections.waiting(step_times(ranks[:1])) is None


def test_the_ranks_that_are_waited_for_longest_are_shown() -> None:
    # Of 10 ranks each is late in one step, by 1 to 10 ms.
    ends = [(step + 1) * 30 for step in range(10)]
    ranks = [
        rank_of(r, [end - 15 + (r + 1) * (r == n) for n, end in enumerate(ends)], ends)
        for r in range(10)
    ]
    section = sections.waiting(step_times(ranks))
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
    steps = step_times(ranks)
    section = sections.scaling(predict(ranks, steps, None, 64), ranks, 64, 0.04)
    assert section is not None
    # Both steps take 10.5 ms on average: one step time, and no other by the model.
    assert section.rows[0] == ["2 measured", "10.5", "2.00", "1.00", "71%", "10.5", "3.81"]
    assert [row[0] for row in section.rows[1:3]] == ["4", "8"]
    assert "own number of ranks it is" in section.note
    assert section.rows[-1][0] == "1,024"
    assert section.rows[6][-2:] == ["-", "-"]  # 128 ranks, of 64 samples
    assert "-" not in section.rows[5]
    assert "as between the ranks of this run" in section.note
    assert "0.5 cores, as they had: 4 ranks shared 2" in section.note
    assert "of 64 samples among the ranks" in section.note
    given = sections.scaling(predict(ranks, steps, parse_network("10gbe")), ranks, None, 0.04)
    assert given is not None
    assert "for the given network: 30.0 µs a message and 10 Gbit/s." in given.note
    assert "samples among" not in given.note
    assert sections.scaling(None, ranks, None, 0.04) is None


def test_the_report_has_all_sections(tmp_path: Path, capsys: Any) -> None:
    lockstep.launch(train_slowly, 2, (tmp_path, Slow("data", 1, 0.01)), ranks="threads")
    report(str(tmp_path), network="20,25")
    html, told = (tmp_path / "report.html").read_text(), capsys.readouterr().out
    for title in ("Who waits for whom", "Memory", "Scaling"):
        assert f">{title}</h2>" in html
        assert title in told
    assert ">Throughput</h2>" in html
    assert "steps/s" in told  # torch's loader doesn't tell the samples
    for words in ("20.0 µs a message and 25 Gbit/s", "1,024"):
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
    lockstep.launch(train_slowly, 2, (tmp_path, Slow("data", 1, 0.01)), ranks="threads")
    report(str(tmp_path))
    options = ("--headless", "--no-sandbox", "--virtual-time-budget=5000", "--dump-dom")
    url = (tmp_path / "report.html").as_uri()
    command = ["chromium", *options, f"--user-data-dir={tmp_path / 'profile'}", url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert 'data-ready="yes"' in done.stdout
    assert re.search(r'id="range"[^>]*>[\d,.]+ \w+ to [\d,.]+ \w+<', done.stdout)


def test_the_page_is_there_although_the_reader_reads_no_further(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lockstep.launch(train_slowly, 2, (tmp_path, Slow("data", 1, 0.0)), ranks="threads")

    def fail(*_: object, **options: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(Console, "print", fail)
    with pytest.raises(BrokenPipeError):
        report(str(tmp_path))
    assert (tmp_path / "report.html").exists()
