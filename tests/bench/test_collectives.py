"""``lockstep bench collectives`` as a user gives it; how fast it finds anything isn't asked."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lockstep import cli
from lockstep.bench import command
from lockstep.bench.command import measure_with_mpi
from lockstep.bench.measuring import Workload
from lockstep.errors import SharedMemoryFull

pytestmark = pytest.mark.forks

LOCKSTEP = [sys.executable, "-m", "lockstep", "bench", "collectives"]
CONTENDERS = {"gloo", "shm", "shm in place"}


def bench(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*LOCKSTEP, *options], capture_output=True, text=True, timeout=100)


@pytest.mark.long
@pytest.mark.true_start
def test_bench_measures_every_size_in_every_round() -> None:
    done = bench("--ranks", "2", "--sizes", "1KiB,1MiB", "--rounds", "2", "--json", "-")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["machine"]["cores"] == len(os.sched_getaffinity(0))
    assert [case["num_bytes"] for case in found["cases"]] == [1024, 2**20]
    for case in found["cases"]:
        expected = CONTENDERS | ({"bound"} if case["num_bytes"] == 2**20 else set())
        assert set(case["seconds"]) - {"mpi"} == expected
        assert all(len(rounds) == 2 and min(rounds) > 0 for rounds in case["seconds"].values())
        assert case["ratios"]["gloo / shm in place"]["median"] > 0
        assert set(case["summary"]) == set(case["seconds"])
    (call,) = found["small_calls"]
    assert (call["num_ranks"], call["num_bytes"], len(call["whole"])) == (2, 1024, 2)
    assert {part["within"] for part in call["parts"]} == {"", call["parts"][3]["name"]}
    assert "measuring all_reduce, 2 ranks, 1 MiB" in done.stderr


@pytest.mark.thorough
def test_bench_prints_tables_and_writes_a_file(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    operations = ["broadcast", "all_gather", "reduce_scatter"]
    options = [word for name in operations for word in ("--operation", name)]
    done = bench("--ranks", "3", "--sizes", "12KiB", "--rounds", "1", "--json", str(file), *options)
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    assert [case["operation"] for case in found["cases"]] == operations
    for name in operations:
        assert f"{name}, float32, 3 ranks" in done.stdout
    assert done.stdout.count("12 KiB") == 3


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--ranks", "1"], "--ranks is 1, but it takes 2 or more"),
        (["--ranks", "two"], "The number of ranks is two"),
        (["--sizes", "1KB"], "--sizes has '1KB', which is no size"),
        (["--rounds", "0"], "The number of rounds is 0"),
        (["--operation", "gather"], "--operation is 'gather', but can be measured: all_reduce"),
        (["--json", "/nowhere/figures.json"], "--json: /nowhere/figures.json can't be written"),
    ],
)
def test_bench_refuses_what_makes_no_sense(
    options: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", [*LOCKSTEP[2:], *options])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_a_size_has_room_or_the_reason_is_told() -> None:
    assert command.reason_to_skip(1024, 2) == ""
    assert "no room" in command.reason_to_skip(2**50, 2)


@pytest.mark.long
def test_sizes_without_room_are_skipped_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(num_bytes: int, num_ranks: int) -> str:
        return "there is no room" if num_bytes > 1024 else ""

    monkeypatch.setattr(command, "reason_to_skip", no_room)
    printed: list[str] = []
    monkeypatch.setattr("builtins.print", lambda *words, **_: printed.extend(words))
    command.collectives(["2"], "1KiB,1MiB", "1", ["broadcast"], "mpiexec", "-")
    found = json.loads(printed[-1])
    assert [case["num_bytes"] for case in found["cases"]] == [1024]
    assert found["skipped"] == ["1 MiB on 2 ranks: there is no room"]


PLAN = Workload(("all_reduce",), (1024,), 2)


def command_that(does: str, folder: Path) -> str:
    file = folder / "mpiexec"
    file.write_text(f"#!/bin/sh\n{does}\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return str(file)


def test_mpi_is_skipped_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "mpi4py isn't installed" in measure_with_mpi(PLAN, 2, "mpiexec").skipped[0]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    (said,) = measure_with_mpi(PLAN, 2, "no-such-command").skipped
    assert said.startswith("MPI, 2 ranks: there is no command 'no-such-command'")


def test_mpi_that_fails_is_skipped_with_what_it_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    fails = command_that("echo 'ImportError: libmpi.so' >&2; echo ---- >&2; exit 3", tmp_path)
    (said,) = measure_with_mpi(PLAN, 2, fails).skipped
    assert said.endswith("ended with exit code 3: ImportError: libmpi.so")
    silent = command_that("exit 0", tmp_path)
    assert "said nothing" in measure_with_mpi(PLAN, 2, silent).skipped[0]


def test_mpi_answers_are_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    case = {
        "operation": "all_reduce", "num_ranks": 2, "num_bytes": 1024, "seconds": {"mpi": [1.0]}
    }  # fmt: skip
    answer = json.dumps({"cases": [case], "implementation": "An MPI 1"})
    answers = command_that(f"for last; do :; done; echo '{answer}' > \"$last\"", tmp_path)
    report = measure_with_mpi(PLAN, 2, answers)
    assert (report.mpi, report.skipped) == ("An MPI 1", [])
    assert report.cases[0].seconds == {"mpi": [1.0]}


def test_memory_that_is_refused_in_a_rank_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check beforehand may be wrong: another program takes memory in between."""
    from lockstep.bench import measuring

    def refuse(*args: object, **kwargs: object) -> None:
        raise SharedMemoryFull("There is no room.")

    class Group:
        empty = staticmethod(refuse)
        size = staticmethod(lambda: 2)

    def gather(reasons: list[str], reason: str, group: object) -> None:
        reasons[:] = ["", reason]

    monkeypatch.setattr("torch.distributed.all_gather_object", gather)
    assert measuring._room_or_reason(1024, None, Group()) == "There is no room."  # type: ignore[arg-type]
