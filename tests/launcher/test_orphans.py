"""Processes whose parents have ended before they could say that they are to end with them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from lockstep.launcher import processes

pytestmark = pytest.mark.forks

# No process is its own parent: to this one, the parent that it names is gone.
ORPHAN = """
import os, signal
from lockstep.launcher.processes import end_with_parent
end_with_parent(os.getpid(), signal.{})
print("goes on")
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_process_whose_parent_has_ended_already_ends_as_by_the_signal(
    number: signal.Signals,
) -> None:
    code = ORPHAN.format(number.name)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 128 + number
    assert done.stdout == ""


@pytest.mark.parametrize("has_launcher", [True, False])
def test_guardian_that_no_launcher_has_got_ends_its_ranks_alone(
    monkeypatch: pytest.MonkeyPatch, has_launcher: bool
) -> None:
    """The launcher that lives has the same mark; it would be ended too."""
    monkeypatch.setenv(processes.MARK, "of-this-test")
    rank, other, launcher = (
        subprocess.Popen(["sleep", "100"], start_new_session=True) for _ in range(3)
    )
    if not has_launcher:
        launcher.kill()
    guardian = processes.Guardian.start([rank.pid], launcher.pid)
    os.close(guardian.lifeline)
    os.waitpid(guardian.pid, 0)
    assert rank.wait(10) == -signal.SIGKILL
    assert other.poll() is None if has_launcher else other.wait(10) == -signal.SIGKILL
    for each in (other, launcher):
        each.kill()
        each.wait(10)
