"""Programs of usual forms, killed wherever they are, end with the bits of one that wasn't."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

pytestmark = pytest.mark.forks

RUN = [sys.executable, "-m", "lockstep", "run", "-n", "2", "--restarts", "9", "-m"]
# Behind the step at which a layer is unfrozen, and at an epoch's end, too.
KILLS = [
    *("1:1:forward", "5:0:evaluation", "7:0:backward"),
    *("9:1:update", "11:0:update", "16:1:forward"),
]


class Done(NamedTuple):
    """What a run has told."""

    digests: list[str]
    failed_in: list[int]  # steps
    went_on_from: list[int | None]
    errors: str


def run(program: str, *ends: str, path: Path | None = None, poison: int = -1) -> Done:
    """Run a program, and have it killed at each of ``ends``."""
    planned = " ".join(f"{end}:SIGKILL" for end in ends)
    done = subprocess.run(
        [*RUN, f"tests.resume.programs.{program}", *([] if path is None else [str(path)])],
        capture_output=True,
        text=True,
        env={**os.environ, "ENDS": planned, "POISON": str(poison)},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    lines = re.findall(r"^restart .*", done.stderr, flags=re.M)
    steps = [re.search(r"failed in step (-?\d+)", line) for line in lines]
    onwards = [re.search(r"go on from (?:an older )?step (?:than )?(\d+)", line) for line in lines]
    return Done(
        sorted(re.findall(r"rank \d has \w+", done.stdout)),
        [int(step[1]) for step in steps if step],
        [int(step[1]) if step else None for step in onwards],
        done.stderr,
    )


@pytest.mark.parametrize(
    "program",
    [
        "gan",
        *(pytest.param(each, marks=pytest.mark.long) for each in ("language_model", "trainer")),
    ],
)
def test_a_program_has_the_same_bits_however_often_it_is_killed(program: str) -> None:
    kills = [end for end in KILLS if "evaluation" not in end or program == "language_model"]
    expected, found = run(program), run(program, *kills)
    assert len(expected.digests) == 2
    assert found.digests == expected.digests
    # Where another rank was behind, that one may be what the launcher has seen.
    planned = [int(end.split(":")[0]) for end in kills]
    assert all(a <= b <= a + 1 for a, b in zip(planned, found.failed_in, strict=True))
    if program == "trainer":  # it adds up the gradients of three steps
        assert all((step or 0) % 3 == 0 for step in found.went_on_from)


def test_a_rank_may_be_killed_in_each_phase(tmp_path: Path) -> None:
    """Of its first attempts too, and in what steps() does: a snapshot is whole, or not there."""
    kills = [
        *("-1:1:start", "0:0:forward", "3:1:data", "4:0:backward", "5:1:room", "7:0:copy"),
        *("-1:1:restore", "9:1:checksum", "11:0:header", "13:1:update", "14:0:save", "17:1:copy"),
    ]
    expected = run("phases")
    found = run("phases", *kills, path=tmp_path / "run")
    assert found.digests == expected.digests
    assert len(found.failed_in) == len(kills)
    assert "the program begins anew, or at its newest checkpoint. " in found.errors
    for kill, step, onwards in zip(kills, found.failed_in, found.went_on_from, strict=True):
        planned = int(kill.split(":")[0])
        if planned >= 0:
            assert planned <= step <= planned + 1, kill  # a thread may be late
            assert abs((onwards or 0) - step) <= 1, kill


@pytest.mark.long
@pytest.mark.parametrize(
    ("poison", "from_what"),
    [
        (7, "the snapshot after step 7"),
        (6, "the checkpoint 000002"),
        (5, "the checkpoint 000001"),
    ],
)
def test_what_fails_alike_goes_on_from_an_older_state(
    tmp_path: Path, poison: int, from_what: str
) -> None:
    """A flipped bit, say, is in the newest snapshot alone, or in both."""
    expected = run("phases")
    path = tmp_path / "run" if "checkpoint" in from_what else None
    found = run("phases", path=path, poison=poison)
    assert found.digests == expected.digests
    assert f"The run goes on from {from_what}" in found.errors


@pytest.mark.long
def test_a_checkpoint_of_the_same_step_as_a_snapshot_is_no_older_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Snapshots are those after steps 9 and 8, checkpoints those after 9, 6 and 3."""
    monkeypatch.setenv("NOTICED_AT", "9")
    expected = run("phases")
    found = run("phases", path=tmp_path / "run", poison=6)
    assert found.digests == expected.digests
    onwards = re.findall(r"came (\d) times. The run goes on from (\D+ \d+)", found.errors)
    assert onwards == [("2", "the snapshot after step 8"), ("3", "the checkpoint 000002")]


@pytest.mark.parametrize("has_path", [pytest.param(False, marks=pytest.mark.long), True])
def test_a_program_with_two_loops_goes_on_in_the_second(tmp_path: Path, has_path: bool) -> None:
    """Without folders it repeats the first one, whose snapshots are overwritten."""
    expected = run("two_loops")
    path = tmp_path / "run" if has_path else None
    found = run("two_loops", "4:1:forward", "8:0:forward", "10:1:forward", path=path)
    assert found.digests == expected.digests
    assert found.failed_in == [4, 8, 10]
    assert ("steps() number 2 of this program has no path" in found.errors) != has_path
    assert found.went_on_from == [4, 8, 10]
