"""Sizes are read and written, and rounds become figures, as one would expect."""

from __future__ import annotations

import io
from functools import partial

import pytest
from rich.console import Console

from lockstep.bench.command import (
    DEFAULT_SIZES,
    PLAIN_WIDTH,
    check_operations,
    format_seconds,
    parse_sizes,
    print_report,
    small_call_lines,
    with_mpi,
)
from lockstep.bench.measuring import (
    OPERATIONS,
    Case,
    MeasuringRanks,
    Quartiles,
    Report,
    SmallCall,
    Stage,
    format_size,
    summarize,
    take_turns,
)
from lockstep.errors import BadLaunch


def test_sizes_are_read_in_every_unit_and_put_in_order() -> None:
    assert parse_sizes("1MiB, 64 kib,1KiB,8B,1KIB", [2]) == (8, 1024, 65536, 2**20)
    assert parse_sizes(DEFAULT_SIZES, [2, 4])[-1] == 256 * 2**20
    assert len(parse_sizes(DEFAULT_SIZES, [2, 4])) == 10


@pytest.mark.parametrize("text", ["", "1KB", "-1KiB", "1.5MiB", "KiB", "1KiB,", "1024"])
def test_sizes_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(BadLaunch, match="is no size"):
        parse_sizes(text, [2])


@pytest.mark.parametrize(("text", "ranks"), [("0KiB", 2), ("1KiB", 3), ("4B", 2), ("6B", 1)])
def test_sizes_that_are_not_equal_parts_are_refused(text: str, ranks: int) -> None:
    with pytest.raises(BadLaunch, match=rf"for {ranks} ranks\. Use a multiple of {4 * ranks} B"):
        parse_sizes(text, [ranks])


@pytest.mark.parametrize("text", ["8 B", "1 KiB", "1000 B", "96 KiB", "256 MiB", "3 GiB"])
def test_format_size_is_what_parse_sizes_reads(text: str) -> None:
    (size,) = parse_sizes(text, [2])
    assert format_size(size) == text


def test_operations_are_known_and_each_once() -> None:
    assert check_operations([*OPERATIONS, "broadcast"]) == OPERATIONS
    with pytest.raises(BadLaunch, match=r"'gather'.*all_reduce, broadcast"):
        check_operations(["gather"])


def test_summarize_gives_median_and_quartiles() -> None:
    assert summarize([5.0]) == Quartiles(5.0, 5.0, 5.0)
    assert summarize([1.0, 2.0, 3.0, 4.0, 100.0]) == Quartiles(3.0, 2.0, 4.0)


def test_each_contender_is_the_first_of_a_round_in_turn() -> None:
    calls: list[str] = []
    ranks = MeasuringRanks(0, 1, lambda: calls.append("|"), lambda seconds: seconds)
    contenders = {name: (str, partial(calls.append, name)) for name in "abc"}
    found = take_turns(ranks, contenders, 4, rounds=3)
    assert {name: len(seconds) for name, seconds in found.items()} == {"a": 3, "b": 3, "c": 3}
    turns = [turn[0] for turn in "".join(calls).split("|")[1:]]  # of one contender each
    assert "".join(turns[-9:]) == "abcbcacab"


def test_ratio_is_formed_in_each_round_by_itself() -> None:
    case = Case("all_reduce", 2, 1024, {"gloo": [10.0, 40.0, 9.0], "shm": [1.0, 2.0, 3.0]})
    assert case.ratio("gloo", "shm") == Quartiles(10.0, 6.5, 15.0)
    assert case.ratio("gloo", "mpi") is None


def test_bandwidth_counts_what_all_ranks_read_and_write() -> None:
    assert Case("all_reduce", 4, 1000, {"bound": [2.0]}).bandwidth() == 4000
    assert Case("all_reduce", 4, 1000, {"shm": [2.0]}).bandwidth() is None


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (Quartiles(2.151e-5, 2e-5, 2.3e-5), "21.5 (20.0-23.0) us"),
        (Quartiles(5e-4, 4.5e-4, 2e-3), "500 (450-2000) us"),
        (Quartiles(1e-3, 9e-4, 2e-3), "1.00 (0.90-2.00) ms"),
    ],
)
def test_format_seconds_has_one_unit(seconds: Quartiles, text: str) -> None:
    assert format_seconds(seconds) == text


def test_with_mpi_adds_figures_to_the_same_case() -> None:
    ours = [Case("all_reduce", 2, 8, {"shm": [1.0]}), Case("broadcast", 2, 8, {"shm": [1.0]})]
    both = with_mpi(ours, [Case("all_reduce", 2, 8, {"mpi": [3.0]})])
    assert [case.seconds for case in both] == [{"shm": [1.0], "mpi": [3.0]}, {"shm": [1.0]}]


SMALL_CALL = SmallCall(
    2, 1024, [2e-5, 2.1e-5], [Stage("meeting", [8e-6]), Stage("calls", [2e-6], "meeting")]
)


def test_small_call_lines_tell_the_whole_from_its_parts() -> None:
    assert [line.strip() for line in small_call_lines(SMALL_CALL)] == [
        "where 20.5 us of a call on 1 KiB go, in us:",
        "8.0  meeting",
        "2.0      of it: calls",
    ]


def test_report_says_what_was_measured_and_what_was_not() -> None:
    seconds = {"gloo": [3e-3, 3e-3], "shm": [1e-3, 1e-3], "shm in place": [5e-4, 5e-4]}
    cases = [
        Case("all_reduce", 2, 1024, seconds),
        Case("all_reduce", 2, 2**20, seconds | {"bound": [4e-4, 4e-4]}),
    ]
    machine = {"cpu": "a processor", "cores": 2, "torch": "2"}
    report = Report(2, cases, ["256 MiB on [4] ranks: no room"], [SMALL_CALL], machine=machine)
    printed = io.StringIO()
    print_report(report, Console(file=printed, width=PLAIN_WIDTH))
    lines = printed.getvalue().splitlines()
    (small,) = (line.split() for line in lines if line.strip().startswith("1 KiB"))
    (large,) = (line.split() for line in lines if line.strip().startswith("1 MiB"))
    assert lines[0].startswith("a processor, 2 cores")
    assert small[:5] == ["1", "KiB", "3.00", "(3.00-3.00)", "ms"]
    assert large[-2:] == ["1.25", "(1.25-1.25)"]  # of the bound
    assert "gloo / shm in place" in printed.getvalue()
    assert "mpi" not in printed.getvalue()
    assert "left out: 256 MiB on [4] ranks: no room" in lines
