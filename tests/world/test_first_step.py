"""The first step has a limit of its own."""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta

import pytest

import lockstep
from tests.world import late


@pytest.mark.parametrize("ranks", ["processes", "threads"])
def test_ranks_wait_longer_for_each_other_until_an_optimizer_has_stepped(ranks: str) -> None:
    assert lockstep.launch(late.late_in, 2, (late.LONG,), ranks=ranks)[0] == "1"
    assert lockstep.launch(late.late_in, 2, (None,), ranks=ranks)[0][0] == "0"


def test_they_do_so_over_gloo() -> None:
    command = [sys.executable, "-m", "lockstep", "run", "-n", "2", late.__file__, "gloo"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert "late in 1\n" in run.stdout, run.stderr


def test_a_limit_of_no_time_is_refused() -> None:
    with pytest.raises(ValueError, match="first_step_timeout is"):
        lockstep.init(first_step_timeout=timedelta(0))
