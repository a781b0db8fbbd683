"""Programs with replicas in processes, from their start to what they leave behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid

import psutil
import pytest

pytestmark = pytest.mark.forks

PROGRAM = """
import os, sys, torch
from torch import nn
import lockstep

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)
    def forward(self, x):
        return self.layer(x)

model = lockstep.DataParallel(Net(), ["cpu", "cpu"], workers="processes")
model(torch.ones(4, 4)).sum().backward()
print(model.module.layer.bias.grad.tolist(), flush=True)
{end}
"""


def run(program: str, mark: str) -> subprocess.CompletedProcess[str]:
    """Run it, with ``mark`` in the environment of all its processes."""
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "LOCKSTEP_TESTS_MARK": mark},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def replicas_of(mark: str) -> list[int]:
    """The processes of replicas of the program that was run with ``mark``."""
    found = []
    for process in psutil.process_iter():
        try:
            if "replicas.worker_main" in " ".join(process.cmdline()) and (
                process.environ().get("LOCKSTEP_TESTS_MARK") == mark
            ):
                found.append(process.pid)
        except psutil.Error:  # it has ended
            continue
    return found


@pytest.mark.parametrize(
    "end",
    [
        pytest.param("", marks=pytest.mark.long),
        "os.kill(os.getpid(), 9)",
        pytest.param("os._exit(0)", marks=pytest.mark.long),
    ],
)
def test_nothing_is_left_of_a_program(end: str) -> None:
    """It is a script without a guard, and its classes are in ``__main__``."""
    mark = uuid.uuid4().hex
    done = run(PROGRAM.format(end=end), mark)
    assert done.stdout == "[4.0, 4.0]\n", done.stderr
    deadline = time.monotonic() + 20
    while left := replicas_of(mark):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def test_nothing_is_left_of_a_program_that_ends_in_its_first_call() -> None:
    """Its output ends when the last process has ended that could write there."""
    mark = uuid.uuid4().hex
    end = "import threading; threading.Timer(0.2, os.kill, (os.getpid(), 9)).start(); model("
    done = run(PROGRAM.replace("model(", end, 1), mark)
    assert (done.returncode, done.stderr) == (-signal.SIGKILL, "")
    assert not replicas_of(mark)


@pytest.mark.long
def test_in_an_interactive_session() -> None:
    typed = PROGRAM.format(end="model = None")
    done = subprocess.run(
        [sys.executable, "-iq"], input=typed, capture_output=True, text=True, timeout=300
    )
    assert done.stdout == "[4.0, 4.0]\n", done.stderr
