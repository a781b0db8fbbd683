"""Programs of usual forms, killed wherever they are, end with the bits of one that wasn't."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

pytestmark = pytest.mark.forks

RUN = [sys.executable, "-m", "lockstep", "run", "-n", "2", "--restarts", "9", "-m"]
# Behind the step at which a layer is unfrozen, and at an epoch's end, too.
KILLS = [
    *("1:1:forward", "5:0:evaluation", "7:0:backward"),
    *("9:1:update", "11:0:update", "16:1:forward"),
]


def results_of(program: str, *ends: str) -> tuple[list[str], list[int]]:
    """The digests of the ranks, and from where the restarts went on."""
    done = subprocess.run(
        [*RUN, f"tests.resume.programs.{program}"],
        capture_output=True,
        text=True,
        env={**os.environ, "ENDS": " ".join(f"{end}:SIGKILL" for end in ends)},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    onwards = re.findall(r"^restart .* all go on from step (\d+)", done.stderr, flags=re.M)
    return sorted(re.findall(r"rank \d has \w+", done.stdout)), [*map(int, onwards)]


@pytest.mark.parametrize("program", ["language_model", "trainer", "gan"])
def test_a_program_has_the_same_bits_however_often_it_is_killed(program: str) -> None:
    expected, _ = results_of(program)
    assert len(expected) == 2
    kills = [end for end in KILLS if "evaluation" not in end or program == "language_model"]
    found, onwards = results_of(program, *kills)
    assert found == expected
    assert len(onwards) >= len(kills) - 1
    if program == "trainer":  # it adds up the gradients of three steps
        assert all(step % 3 == 0 for step in onwards)
