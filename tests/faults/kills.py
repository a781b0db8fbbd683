"""SIGKILLs of random ranks at random moments, several in each run; how soon it makes new steps."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import time
from typing import NamedTuple

import psutil

from tests.faults.judge import to_next_step
from tests.faults.plan import NETWORKS, Run
from tests.faults.trial import Trial, shared_memory, undisturbed

KILLS_OF_A_RUN = 5
EPOCHS, STEP_SECONDS = 40, 0.02
_BOUND_SECONDS = 90.0
# Between two kills: so that the second hits a start, and so that steps come before.
_SECONDS_BETWEEN = ((0.0, 0.9), (1.0, 3.0))
_RESTARTS = 30


class Killed(NamedTuple):
    """A run in which ranks were killed.

    Attributes:
        run: What ran.
        num_kills: How many ranks were.
        seconds: From each kill to the end of the next new step on all ranks; of those after which
            one came before the next kill.
        problems: What was wrong.
        output: What the command wrote.
    """

    run: Run
    num_kills: int
    seconds: list[float]
    problems: list[str]
    output: str


def killed_at_random(seed: str) -> Killed:
    """Start a run, kill ranks of it, and judge its end."""
    draw = random.Random(seed)
    run = Run(
        draw.randint(2, 4),
        draw.choice(NETWORKS),
        is_sharded=draw.random() < 0.5,
        num_workers=draw.randint(0, 1),
        has_path=draw.random() < 0.5,
    )
    options = {"epochs": EPOCHS, "step_seconds": STEP_SECONDS}
    expected = undisturbed(run, _BOUND_SECONDS, **options)
    before = shared_memory()
    with Trial(run, **options) as trial:
        process = trial.start({}, _RESTARTS)
        times = _kill_ranks(process, draw)
        seen = trial.end_of(process, _BOUND_SECONDS)
        problems = ["hang"] if seen.hung else []
        if seen.code:
            problems.append(f"the end is {seen.code}")
        elif [result["bits"] for result in trial.results()] != expected:
            problems.append("other bits than the undisturbed run's")
        if any(restart.reason != "SIGKILL" for restart in seen.restarts):
            problems.append(f"the reasons are {[restart.reason for restart in seen.restarts]}")
        if left := trial.left_behind(before):
            problems.append(f"left behind: {left}")
        ends = trial.steps()
        found = [to_next_step(ends, at, run.size) for at in times]
    until = [b - a for a, b in zip(times, [*times[1:], float("inf")], strict=True)]
    seconds = [s for s, most in zip(found, until, strict=True) if s is not None and s < most]
    return Killed(run, len(times), seconds, problems, seen.output)


def _kill_ranks(process: subprocess.Popen[bytes], draw: random.Random) -> list[float]:
    """Kill ranks at random moments, also those that haven't begun; return when."""
    times: list[float] = []
    while process.poll() is None and len(times) < KILLS_OF_A_RUN:
        time.sleep(draw.uniform(*draw.choice(_SECONDS_BETWEEN)))
        if ranks := _ranks(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(draw.choice(ranks), signal.SIGKILL)
                times.append(time.monotonic())
    return times


def _ranks(launcher: int) -> list[int]:
    """The ranks that have begun or wait to: children that lead a group, and no session."""
    found = []
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(launcher).children():
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                leads = os.getpgid(child.pid) == child.pid != os.getsid(child.pid)
                if leads and child.status() != psutil.STATUS_ZOMBIE:
                    found.append(child.pid)
    return found
