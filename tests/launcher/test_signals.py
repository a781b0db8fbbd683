"""Signals to the launcher: who gets them, and what the ranks have time for."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import BadLaunch
from lockstep.launcher import launch
from lockstep.launcher.job import GRACE_SECONDS, check_grace
from lockstep.launcher.processes import TELL, Escalation, after_signal
from tests.launcher.bench import Bench
from tests.waiting import until

pytestmark = pytest.mark.forks

PAGE = Path(__file__).parents[2] / "docs" / "failures.md"
(RECIPE,) = [
    block
    for block in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.M | re.S)
    if "SIGTERM" in block
]

# A signal to the whole process group would end a loader's worker.
WORKING = """
    import signal
    from torch.utils.data import DataLoader

    asked = []
    signal.signal(signal.{name}, lambda number, frame: asked.append(number))
    left = 50  # many more than its worker has made beforehand
    for number, _ in enumerate(DataLoader(range(10**7), num_workers=1)):
        if number == 0:
            print("ready", flush=True)
        if asked:
            left -= 1
        if not left:
            break
    print("saved after", signal.Signals(asked[0]).name, flush=True)
    """
# Ends when it is allowed to.
SAVING = """
    import os, pathlib, signal, time

    def work(*world):
        asked = []
        signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
        print("ready", flush=True)
        while not asked:
            time.sleep(0.01)
        print("asked", flush=True)
        while not pathlib.Path("go").exists():
            time.sleep(0.01)
        pathlib.Path("saved" + os.environ["RANK"]).touch()
    """
STUBBORN = """
    import signal, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("ready", flush=True)
    time.sleep(1000)
    """


def wait_for(word: str, run: subprocess.Popen[str]) -> None:
    """Wait until both ranks have said it."""
    assert run.stdout is not None
    for _ in range(2):
        assert word in run.stdout.readline()


def started(bench: Bench, text: str, *options: str) -> subprocess.Popen[str]:
    """Two ranks of the script, both of which have said that they are ready."""
    run = bench.start("run", "-n", 2, *options, bench.script(text))
    wait_for("ready", run)
    return run


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        pytest.param(signal.SIGINT, marks=pytest.mark.long),
        signal.SIGUSR1,
    ],
)
def test_ranks_save_with_loader_workers_after_a_signal(
    bench: Bench, number: signal.Signals
) -> None:
    run = started(bench, WORKING.format(name=number.name))
    run.send_signal(number)
    out, err = run.communicate(timeout=100)
    assert sorted(out.splitlines()) == [
        f"[rank {rank}] saved after {number.name}" for rank in range(2)
    ]
    assert run.returncode == (0 if number == signal.SIGUSR1 else 128 + number), err
    assert bench.processes() == []


WAITING = """
    import os, signal, threading

    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])

    def wait():
        print("ready", flush=True)
        signal.sigwait([signal.SIGUSR1])
        print("saved", flush=True)

    if os.environ["RANK"] == "0":
        wait()
    else:
        waiting = threading.Thread(target=wait)
        waiting.start()
        waiting.join()
    """


def test_a_signal_is_passed_on_to_ranks_that_wait_for_it_in_any_thread(bench: Bench) -> None:
    run = started(bench, WAITING)
    time.sleep(0.1)  # from the word to the wait
    run.send_signal(signal.SIGUSR1)
    out, err = run.communicate(timeout=60)
    assert sorted(out.splitlines()) == ["[rank 0] saved", "[rank 1] saved"], err
    assert run.returncode == 0


def test_a_signal_that_no_rank_handles_is_told_of_and_ends_nothing(bench: Bench) -> None:
    run = started(bench, STUBBORN, "--grace", "0")
    run.send_signal(signal.SIGUSR2)
    assert run.stderr is not None
    told = "lockstep: SIGUSR2 came, and no rank has a handler for it: nothing is done.\n"
    assert run.stderr.readline() == told
    run.terminate()  # without any grace they are killed at once
    assert run.wait(60) == 128 + signal.SIGTERM
    assert bench.processes() == []


def test_sigterm_comes_twice_and_ranks_still_have_their_time(bench: Bench) -> None:
    run = started(bench, SAVING + "\n    work()\n")
    run.terminate()
    wait_for("asked", run)
    run.terminate()
    run.terminate()
    (bench.directory / "go").touch()
    assert run.wait(60) == 128 + signal.SIGTERM
    assert all((bench.directory / f"saved{rank}").exists() for rank in range(2))


@pytest.mark.long
def test_ranks_of_launch_save_when_their_caller_is_ended(bench: Bench) -> None:
    script = bench.script(SAVING + "\n    import lockstep\n    lockstep.launch(work)\n")
    run = bench.start_python(script)
    wait_for("ready", run)
    run.terminate()
    assert run.wait(60) == -signal.SIGTERM
    (bench.directory / "go").touch()
    assert until(lambda: all((bench.directory / f"saved{rank}").exists() for rank in range(2)))
    assert until(lambda: not bench.processes())


def test_a_checkpoint_has_half_a_minute_and_who_is_waited_for_is_told() -> None:
    """By the plan, not by a clock."""
    escalation = Escalation(after_signal(signal.SIGTERM, GRACE_SECONDS))
    assert escalation.take(0.0) == [signal.SIGTERM]
    assert escalation.take(3.0) == [TELL]
    assert escalation.seconds_to_kill(3.0) == GRACE_SECONDS - 3
    assert escalation.take(29.9) == []
    assert escalation.take(30.0) == [signal.SIGKILL]
    numbers = [number for number, _ in after_signal(signal.SIGINT, 30.0)]
    assert numbers == [signal.SIGINT, TELL, signal.SIGTERM, TELL, signal.SIGKILL]


@pytest.mark.parametrize("grace", ["soon", "-1", "nan", "inf", -1, True, "1e9"])
def test_a_grace_that_makes_no_sense_is_refused(grace: Any) -> None:
    with pytest.raises(BadLaunch, match=f"The grace is {grace}, but seconds from 0"):
        check_grace(grace)


def test_threads_have_no_grace() -> None:
    with pytest.raises(BadLaunch, match="threads can't be killed"):
        launch(print, ranks="threads", grace=1.0)


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_the_recipe_of_the_docs_saves(bench: Bench, number: signal.Signals) -> None:
    endless = RECIPE.replace("NUM_EPOCHS = 2", "NUM_EPOCHS = 10**9")
    said = endless.replace("            optimizer.step()", "            optimizer.step(); say()")
    run = started(bench, "say = iter(lambda: print('ready', flush=True), 0).__next__\n" + said)
    run.send_signal(number)
    out, err = run.communicate(timeout=100)
    assert run.returncode == (0 if number == signal.SIGUSR1 else 128 + number), out + err
    assert (bench.directory / "run-ended" / "000001").is_dir()
