"""However the launcher ends, nothing that it started outlives it."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest

from lockstep import deadline
from lockstep.launcher import processes
from tests.launcher.bench import Bench, up_to_thrice
from tests.waiting import until

pytestmark = pytest.mark.forks

# Each rank has two children: one in its process group, one in a session of its own.
BUSY = """
    import os, subprocess, sys, time
    subprocess.Popen(["sleep", "1000"])
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    print("ready", flush=True)
    while True:
        time.sleep(100)
    """
STUBBORN = """
    import signal
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: print("asked to end", flush=True))
    """


def start_busy(bench: Bench, *, stubborn: bool = False, **options: object) -> subprocess.Popen[str]:
    text = STUBBORN + BUSY if stubborn else BUSY
    run = bench.start("run", "-n", 2, bench.script(text), **options)
    if run.stdout is not None:
        for _ in range(2):
            assert "ready" in run.stdout.readline()
        # The launcher, its guardian, two ranks, four children.
        assert until(lambda: len(bench.processes()) == 8)  # one may be between a fork and a program
    return run


def test_signal_to_the_launcher_leaves_nothing(bench: Bench) -> None:
    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    script = bench.script(BUSY)
    runs = [bench.start("run", "-n", 2, script) for _ in numbers]
    for run in runs:
        assert run.stdout is not None
        for _ in range(2):
            assert "ready" in run.stdout.readline()
    for num_left, (run, number) in zip((2, 1, 0), zip(runs, numbers, strict=True), strict=True):
        run.send_signal(number)
        assert run.wait(60) == 128 + number
        # The launcher, its guardian, two ranks, four children; the other runs go on.
        assert until(lambda num=8 * num_left: len(bench.processes()) == num)
        assert run.stderr is not None
        said = run.stderr.read()
        assert number.name in said
        assert "Traceback" not in said
    assert bench.processes() == []


def test_second_ctrl_c_ends_at_once(bench: Bench) -> None:
    for _ in range(3):  # on a machine that stands still meanwhile, the ranks are asked before
        run = start_busy(bench, stubborn=True)
        run.send_signal(signal.SIGINT)
        time.sleep(0.2)  # two signals of one kind that come together are one
        run.send_signal(signal.SIGINT)
        assert run.wait(60) == 130
        assert bench.processes() == []
        assert run.stdout is not None
        if "asked to end" not in run.stdout.read():
            return
    pytest.fail("The ranks were asked to end by SIGTERM, as after a single Ctrl-C.")


@pytest.mark.true_start
def test_killed_launcher_leaves_nothing(bench: Bench) -> None:
    run = start_busy(bench)
    run.kill()
    assert until(lambda: not bench.processes())


def test_closed_terminal_leaves_nothing(bench: Bench) -> None:
    ours, theirs = pty.openpty()

    def take_terminal() -> None:
        os.setsid()
        import fcntl
        import termios

        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    run = start_busy(bench, stdin=theirs, stdout=theirs, stderr=theirs, preexec_fn=take_terminal)
    os.close(theirs)
    shown = b""
    while shown.count(b"ready") < 2:
        shown += os.read(ours, 4096)
    assert until(lambda: len(bench.processes()) == 8)  # one may be between a fork and a program
    os.close(ours)  # the kernel sends SIGHUP
    assert run.wait(60) == 128 + signal.SIGHUP
    assert bench.processes() == []


@pytest.mark.parametrize("stall", [0.0, 60.0])
@pytest.mark.parametrize("seconds_per_look", [0.0, 0.1])
def test_what_ranks_left_behind_is_asked_to_end_before_it_is_killed(
    monkeypatch: pytest.MonkeyPatch, seconds_per_look: float, stall: float
) -> None:
    """For a second, be /proc large or the machine standing still."""
    clock = [0.0]
    sent: list[tuple[int, int, float]] = []
    looks: list[float] = []

    def sleep(seconds: float) -> None:
        clock[0] += seconds + (stall if len(looks) == 1 else 0.0)

    def look(spare: set[int]) -> set[int]:
        clock[0] += seconds_per_look
        looks.append(clock[0])
        return {5}

    fake = SimpleNamespace(sleep=sleep, monotonic=lambda: clock[0])
    monkeypatch.setattr(processes, "time", fake)
    monkeypatch.setattr(deadline, "time", fake)
    monkeypatch.setattr(processes, "_descendants", look)
    monkeypatch.setattr(
        processes, "send_signal", lambda _, number: sent.append((number, len(looks), clock[0]))
    )
    processes.sweep(set())
    (first, looks_before, asked_at), (last, looks_after, killed_at) = sent
    assert (first, last) == (signal.SIGTERM, signal.SIGKILL)
    assert looks_after - looks_before >= 25
    assert 1.0 <= killed_at - asked_at <= 4.0 + stall


@up_to_thrice
def test_ctrl_c_lets_a_script_clean_up(bench: Bench) -> None:
    script = bench.script(
        """
        import time
        try:
            print("ready", flush=True)
            time.sleep(1000)
        except KeyboardInterrupt:
            print("saving")
            raise
        """
    )
    run = bench.start("run", "-n", 1, script)
    assert run.stdout is not None
    assert run.stderr is not None
    run.stdout.readline()
    run.send_signal(signal.SIGINT)
    assert run.wait(60) == 130
    assert run.stdout.read() == "[rank 0] saving\n"
    assert "Traceback" not in run.stderr.read()


# Nothing of the run is to be seen in the first but its parents.
HIDDEN = """
    import os, subprocess, time
    environment = {"PATH": os.environ["PATH"]}
    hidden = subprocess.Popen(["sleep", "1000"], start_new_session=True, env=environment)
    subprocess.run(["sh", "-c", "sleep 0.1 & echo $! > orphan"], env=environment)
    print(hidden.pid, flush=True)
    while True:
        time.sleep(100)
    """


def test_what_left_its_session_and_environment_ends_too(bench: Bench) -> None:
    run = bench.start("run", "-n", 1, bench.script(HIDDEN))
    assert run.stdout is not None
    hidden = int(run.stdout.readline().removeprefix("[rank 0] "))
    orphan = int((bench.directory / "orphan").read_text())
    assert until(lambda: not psutil.pid_exists(orphan)), "it is left as a zombie"
    assert psutil.pid_exists(hidden)
    run.terminate()
    assert run.wait(60) == 128 + signal.SIGTERM
    assert until(lambda: not psutil.pid_exists(hidden))


def test_what_was_there_before_the_launcher_is_left_alone(bench: Bench) -> None:
    command = 'sleep 1000 > /dev/null 2>&1 & echo $!; exec "$@"'
    run = [sys.executable, "-m", "lockstep", "run", "-n", "1", str(bench.script("print('ran')"))]
    before, *output = subprocess.run(
        ["sh", "-c", command, "sh", *run], capture_output=True, text=True, timeout=60, check=True
    ).stdout.splitlines()
    assert output == ["[rank 0] ran"]
    process = psutil.Process(int(before))
    assert process.status() == psutil.STATUS_SLEEPING
    process.kill()
