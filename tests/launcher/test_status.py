"""``lockstep status``: which rank others wait for, and where it is."""

from __future__ import annotations

import os
import signal
import subprocess
from functools import partial
from typing import Any

import pytest

from lockstep.run_status import RunStatus
from lockstep.status import STACKS_SIGNAL
from tests.launcher.bench import Bench
from tests.waiting import until

pytestmark = pytest.mark.forks

SECOND = 1_000_000_000
SCRIPT = """
import os, time
import torch, lockstep
world = lockstep.init()
optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
def read_slowly():
    open("slow", "w").close()
    # On one line, and in no function of Python's, whenever it is looked at.
    while not os.access("go", os.F_OK): time.sleep(0.02)
for step in range(5):
    if step == 3 and world.rank == 1:
        read_slowly()
    lockstep.reduce(1.0)
    optimizer.step()
"""


def status_of(bench: Bench, *words: str) -> subprocess.CompletedProcess[str]:
    return bench.run("status", *words, env={**os.environ, "COLUMNS": "200"})


def test_a_rank_that_others_wait_for_is_told_with_its_line(bench: Bench) -> None:
    run = bench.start("run", "-n", 2, bench.script(SCRIPT))
    assert until((bench.directory / "slow").exists)
    assert until(lambda: "all_gather for 0:" in status_of(bench, str(run.pid)).stdout)
    told = status_of(bench, "--stacks", str(run.pid)).stdout
    (bench.directory / "go").touch()
    assert run.wait(60) == 0
    words, _, rows = told.partition("\n")
    assert words.startswith(f"{bench.directory}/script.py: process {run.pid}, for 0:")
    of_rank = {line.split()[0]: line for line in rows.splitlines() if line[:1].isdigit()}
    assert "waits in all_gather for 0:" in of_rank["0"]
    assert "script.py:13, in <module>" in of_rank["0"]
    assert "computes" in of_rank["1"]
    assert "script.py:9, in read_slowly" in of_rank["1"]
    assert "Rank 0 has waited in all_gather for 0:" in told
    assert "for rank 1. Rank 1 is at" in told
    # The whole stack, but for the launcher's own frames.
    stack = told[told.index("rank 1, innermost line first:") :].splitlines()[1:]
    assert [line.rsplit(":", 1)[1] for line in stack] == ["9, in read_slowly", "12, in <module>"]


def test_a_stopped_rank_is_told(bench: Bench) -> None:
    run = bench.start("run", "-n", 2, bench.script(SCRIPT))
    assert until((bench.directory / "slow").exists)
    pid = RunStatus.of(run.pid).ranks[0].read().pid
    os.kill(pid, signal.SIGSTOP)
    try:
        assert until(lambda: "Rank 0 is stopped" in status_of(bench, str(run.pid)).stdout)
    finally:
        os.kill(pid, signal.SIGCONT)
        (bench.directory / "go").touch()
    assert run.wait(60) == 0


def test_no_run_is_an_error(bench: Bench) -> None:
    done = status_of(bench, "1")
    assert done.returncode == 2
    assert "No run with the process id 1" in done.stderr


def test_a_process_that_does_not_catch_the_signal_is_left_alone(bench: Bench) -> None:
    # The process of the rank has become another program, which the signal would end.
    waiter = bench.script(
        """
        import os, time
        open("begun", "w").close()
        while not os.path.exists("go"):
            time.sleep(0.02)
        """,
        "waiter.py",
    )
    script = bench.script(f"import os, sys; os.execv(sys.executable, ['python', '{waiter}'])")
    run = bench.start("run", "-n", 1, script)
    assert until((bench.directory / "begun").exists)
    assert status_of(bench, str(run.pid)).returncode == 0
    (bench.directory / "go").touch()
    assert run.wait(60) == 0


def test_processes_that_end_meanwhile_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def list_all_but_gone(original: Any, path: Any) -> Any:
        if str(path).endswith("/fd") and str(path) != f"/proc/{os.getpid()}/fd":
            raise FileNotFoundError(path)
        return original(path)

    monkeypatch.setattr(os, "listdir", partial(list_all_but_gone, os.listdir))
    monkeypatch.setattr(os, "scandir", partial(list_all_but_gone, os.scandir))
    kept = RunStatus.create("train.py", 1)
    assert kept.facts == RunStatus.of(os.getpid()).facts


def test_pages_hold_what_a_rank_writes() -> None:
    rank = RunStatus.create("train.py", 3).ranks[2]
    rank.begin(5)
    outer = rank.enter("save", "")
    inner = rank.enter("wait", "all_reduce" * 20)
    rank.log(3, 10, {"loss": 0.5})
    rank.log(4, 10, {"x" * 5000: 1.0})  # too long to be shown
    rank.log(5, 10, {"lr": 0.1})
    state = rank.read()
    assert (state.pid, state.rank, state.state) == (os.getpid(), 5, "wait")
    assert state.detail == ("all_reduce" * 20)[:64]
    assert (state.logged_step, state.values) == (5, {"lr": 0.1})
    rank.log(6, 10, {"loss": 0.25})
    rank.log(7, 10, {"loss": 0.125, "accuracy": 0.75})
    assert rank.read().values == {"lr": 0.1, "loss": 0.125, "accuracy": 0.75}
    assert state.waited > 0
    rank.leave(inner)
    assert (rank.read().state, rank.read().waited) == ("save", rank.read().waited)
    rank.leave(outer)
    assert rank.read().state == "program"
    assert STACKS_SIGNAL > signal.SIGUSR2
