"""A process that is to end with its parent, and whose parent has ended before it could say so."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

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
