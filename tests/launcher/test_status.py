"""``lockstep status``: which rank others wait for, and where it is."""

from __future__ import annotations

import os
import signal
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.observe.attach import Frame, Observed, _main_stack, verdict
from lockstep.status import STACKS_SIGNAL, RankState, RunStatus, running
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
    while not os.path.exists("go"):
        time.sleep(0.02)
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
    (found,) = [each for each in running() if each.facts["pid"] == run.pid]
    pid = found.ranks[0].read().pid
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


TORCHS = Path(torch.__file__).parent / "nn.py"
DUMP = f"""\
Thread 0x00007f01 (most recent call first):
  File "/x/threading.py", line 1 in wait

Current thread 0x00007f02 (most recent call first):
  File "{TORCHS}", line 7 in forward
  File "/home/me/lockstep/train.py", line 5 in step
  File "/home/me/lockstep/train.py", line 9 in <module>
  File "/y/rank.py", line 3 in _run_script
  File "/y/supervisor.py", line 3 in main
"""


def test_the_main_threads_frames_up_to_the_launchers_are_read() -> None:
    frames = _main_stack(DUMP)
    assert [frame.line for frame in frames] == [7, 5, 9]
    assert str(Observed(STATE, 0, "running", frames).place).endswith("train.py:5, in step")
    assert _main_stack("") == []


STATE = RankState(9, 0, "program", "", 0, 0, 0, 0, 0, 0, 0, 0, 0, {}, 0)


def observed(rank: int, state: str, since: float, steps: int = 0, detail: str = "x") -> Observed:
    now = STATE._replace(rank=rank, state=state, since=int(since * SECOND), detail=detail)
    return Observed(now, steps, "running", [Frame("/a/train.py", 3, "f")])


def test_verdicts() -> None:
    def told(*ranks: Observed) -> str:
        return verdict(ranks, 100 * SECOND)

    late, early = (
        observed(2, "program", 0),
        [observed(r, "wait", 58, detail="send") for r in (0, 1)],
    )
    assert told(*early, late) == (
        "Ranks 0 and 1 have waited in send for 0:42, for rank 2. Rank 2 is at /a/train.py:3, in f."
    )
    assert told(*early).startswith("All ranks of this host have waited in send for 0:42")
    assert "in different operations: recv, send" in told(
        early[0], observed(1, "wait", 1, detail="recv")
    )
    assert told(observed(0, "wait", 98), late) == "No rank has waited for others for more than 5 s."
    assert told(observed(0, "wait", 1, steps=3), late) == "It goes on: 3 steps in 0.5 s."
    assert told(late, observed(1, "wait", 1)._replace(process="gone")) == "Rank 1 is gone."
    over = [observed(r, "end", 99, steps=3)._replace(process="gone") for r in (0, 1)]
    assert told(*over) == "The run is over: the program has ended on all ranks of this host."
    exiting = observed(1, "end", 99)
    assert told(over[0], exiting).endswith("The process of rank 1 has yet to end.")
    assert told(over[0], observed(1, "program", 0, steps=2)) == (
        "Rank 0 has ended. It goes on: 2 steps in 0.5 s."
    )
    assert told(over[0], early[1]) == (
        "Rank 0 has ended. Rank 1 has waited in send for 0:42, to which rank 0 will not come."
    )
    unread = late._replace(stack=[])
    assert told(*early, unread).endswith("for rank 2. Their stacks couldn't be read.")
    hasnt = observed(1, "program", 0)
    hasnt = hasnt._replace(state=hasnt.state._replace(pid=0))
    assert told(late, hasnt) == "1 of 2 ranks haven't begun."


def test_processes_that_end_meanwhile_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def list_all_but_gone(own: Any, path: Any) -> Any:
        if str(path).endswith("/fd") and str(path) != f"/proc/{os.getpid()}/fd":
            raise FileNotFoundError(path)
        return own(path)

    monkeypatch.setattr(os, "listdir", partial(list_all_but_gone, os.listdir))
    monkeypatch.setattr(os, "scandir", partial(list_all_but_gone, os.scandir))
    kept = RunStatus.create("train.py", 1)
    assert kept.facts in [each.facts for each in running()]


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
