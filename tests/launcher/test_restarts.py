"""Ranks that fail are started again: what they find, what is said, and when it is enough."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

import lockstep
from lockstep.errors import BadLaunch, LaunchError, RankFailed
from lockstep.launcher import START_AGAIN, Job, processes, zygote
from lockstep.launcher.restarts import DONT_START_AGAIN, Incident, Reaction, Record
from lockstep.launcher.watch import Watch
from tests.launcher.bench import Bench, lines_of
from tests.waiting import until

pytestmark = pytest.mark.forks

# Counts to 12 in a file that it replaces in each step, as a program with checkpoints of its own.
COUNTS = """
    import os, signal, sys, time
    from datetime import timedelta
    import lockstep
    world = lockstep.init(timeout=timedelta(seconds=10))
    restarts = int(os.environ["LOCKSTEP_RESTARTS"])
    faults = dict(word.split("=") for word in sys.argv[1:])

    def count_of(rank):
        return int(open(f"count-{rank}").read()) if os.path.exists(f"count-{rank}") else 0

    def fail(kind):
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "raise":
            raise ZeroDivisionError("on purpose")
        elif kind == "leave":
            os._exit(0)
        elif kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)

    count = lockstep.reduce(min(map(count_of, range(world.world_size))), "min")
    print(f"attempt {restarts} from {count}", flush=True)
    while count < 12:
        assert lockstep.reduce(count, "sum") == count * world.world_size
        count += 1
        with open(f"count-{world.rank}.new", "w") as new:
            new.write(str(count))
        os.replace(f"count-{world.rank}.new", f"count-{world.rank}")
        if world.rank == world.world_size - 1 and restarts == count // 4 - 1:
            fail(faults.get(str(count)))
        time.sleep(float(os.environ.get("STEP_SECONDS", 0)))
    print(f"counted to {count}", flush=True)
    """


def test_ranks_are_started_again_and_go_on_from_their_files(bench: Bench) -> None:
    script = bench.script(COUNTS)
    faults = ("4=kill", "8=raise")
    done = bench.run("run", "-n", 2, "--restarts", 3, "--log-dir", "logs", script, *faults)
    assert done.returncode == 0, done.stderr
    expected = ["attempt 0 from 0", "attempt 1 from 4", "attempt 2 from 8", "counted to 12"]
    for rank in range(2):
        assert lines_of(done.stdout, rank)[0] == expected[0]
        assert lines_of(done.stdout, rank)[-1] == expected[-1]
    assert "rank 1 of 2 failed first: it was ended by SIGKILL" in done.stderr
    assert "ZeroDivisionError: on purpose" in done.stderr
    first, second = [line for line in done.stderr.splitlines() if line.startswith("restart ")]
    assert first.startswith("restart 1: rank 1 of 2 failed")
    assert "(SIGKILL)" in first
    assert second.startswith("restart 2: rank 1 of 2 failed")
    assert "(ZeroDivisionError: on purpose)" in second
    # Each attempt has logs of its own.
    logs = {path.name: path.read_text() for path in (bench.directory / "logs").iterdir()}
    assert sorted(logs) == sorted(
        f"rank-{rank}{end}.log" for rank in range(2) for end in ("", ".restart-1", ".restart-2")
    )
    assert "attempt 0 from 0" in logs["rank-1.log"]
    assert "ZeroDivisionError" in logs["rank-1.restart-1.log"]
    assert "counted to 12" in logs["rank-0.restart-2.log"]


def test_culprit_is_named_though_ends_are_quick(bench: Bench) -> None:
    """Also one that tells of no failure, where all reports are of ranks that have lost it."""
    script = bench.script(COUNTS)
    done = bench.run("run", "-n", 2, "--restarts", 2, script, "4=leave", "8=stop")
    assert done.returncode == 0, done.stderr
    assert "restart 1: rank 1 of 2 failed in step 0 (it left early)" in done.stderr
    assert "restart 2: rank 1 of 2 failed in step 0 (it stood still)" in done.stderr


def test_kills_at_random_moments_lose_nothing(bench: Bench) -> None:
    script = bench.script(COUNTS)
    environment = {**os.environ, "STEP_SECONDS": "0.05"}
    run = bench.start("run", "-n", 2, "--restarts", 30, "-m", script.stem, env=environment)
    draw = random.Random(0)
    num_kills = 0
    while run.poll() is None and num_kills < 8:
        ranks = [each for each in bench.processes() if is_rank(each, run.pid)]
        if ranks and (bench.directory / "count-0").exists():
            os.kill(draw.choice(ranks).pid, signal.SIGKILL)
            num_kills += 1
        time.sleep(draw.uniform(0.02, 0.4))
    out, err = run.communicate(timeout=100)
    assert run.returncode == 0, err
    assert num_kills > 1
    for rank in range(2):
        assert (bench.directory / f"count-{rank}").read_text() == "12"
        assert lines_of(out, rank)[-1] == "counted to 12"


def is_rank(process: psutil.Process, launcher: int) -> bool:
    """Whether the process is a rank that has begun: it leads a group, and isn't the guardian."""
    try:
        is_leader = os.getpgid(process.pid) == process.pid != launcher
        return is_leader and os.getsid(process.pid) != process.pid
    except ProcessLookupError:
        return False


def test_what_fails_alike_each_time_is_blamed(bench: Bench) -> None:
    script = bench.script("import lockstep; lockstep.init(); print('begun', flush=True); 1 / 0")
    done = bench.run("run", "-n", 2, "--restarts", 2, script)
    assert done.returncode == DONT_START_AGAIN
    for rank in range(2):
        assert lines_of(done.stdout, rank).count("begun") <= 3
    assert done.stdout.count("begun") >= 3
    assert done.stderr.count("restart ") == 2
    assert "The ranks aren't started again: it failed alike at the same place" in done.stderr
    assert "ZeroDivisionError" in done.stderr


@pytest.mark.parametrize(
    "text",
    [
        "import no_such_module",
        "import argparse; argparse.ArgumentParser().parse_args(['--no-such-option'])",
    ],
    ids=["import", "arguments"],
)
def test_program_that_never_begins_is_not_started_again(bench: Bench, text: str) -> None:
    done = bench.run("run", "-n", 2, "--max-restarts", 3, bench.script(text))
    assert done.returncode == DONT_START_AGAIN
    assert "restart 1" not in done.stderr
    assert "the program never began" in done.stderr


STOPS = """
    import os, signal, sys, time
    import lockstep
    world = lockstep.init()
    asked = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
    print("ready", flush=True)
    while not asked:
        time.sleep(0.01)
    time.sleep(0.3 * world.rank)
    sys.exit(75)
    """


@pytest.mark.parametrize("restarts", [0, 3])
def test_ranks_that_stop_and_save_are_to_be_started_again_by_the_scheduler(
    bench: Bench, restarts: int
) -> None:
    run = bench.start("run", "-n", 2, "--restarts", restarts, bench.script(STOPS))
    assert run.stdout is not None
    for _ in range(2):
        assert "ready" in run.stdout.readline()
    run.send_signal(signal.SIGTERM)
    _, err = run.communicate(timeout=60)
    assert run.returncode == START_AGAIN
    assert "stopped by SIGTERM and saved" in err
    assert "restart 1" not in err


def test_launcher_that_is_asked_to_end_starts_nothing_again(bench: Bench) -> None:
    script = bench.script("import lockstep, time; lockstep.init(); print('ready'); time.sleep(100)")
    exit_codes = {signal.SIGTERM: START_AGAIN, signal.SIGUSR1: START_AGAIN, signal.SIGINT: 130}
    options = ("-n", 2, "--restarts", 3, "--stop-signal", "SIGUSR1", "--grace", "0.2")
    runs = [bench.start("run", *options, script) for _ in exit_codes]
    for run, (number, exit_code) in zip(runs, exit_codes.items(), strict=True):
        assert run.stdout is not None
        for _ in range(2):
            assert "ready" in run.stdout.readline()
        run.send_signal(number)
        _, err = run.communicate(timeout=60)
        assert run.returncode == exit_code
        assert f"ended by {number.name}; no rank is left running." in err
        assert ("No step had begun. Give the same command" in err) is (exit_code == START_AGAIN)
    assert bench.processes() == []


APART = """
    import os, subprocess, sys
    import lockstep, torch.distributed as dist
    world = lockstep.init()
    names = "LOCKSTEP_RUN_ID LOCKSTEP_STORE TORCHELASTIC_RUN_ID TORCHELASTIC_RESTART_COUNT".split()
    facts = [os.environ[name] for name in names]
    store = dist.distributed_c10d._get_default_store()
    if os.environ["LOCKSTEP_RESTARTS"] == "0":
        if world.rank == 0:
            store.set("late", "a message of the attempt before")
            print("first", *facts, flush=True)
            sleeps = [subprocess.Popen(["sleep", "1000"], start_new_session=new) for new in (0, 1)]
            if (pid := os.fork()) == 0:
                os.setsid()
                while True:
                    os.read(0, 1) or __import__("time").sleep(1000)
            print("pids", pid, *(each.pid for each in sleeps), flush=True)
        lockstep.reduce(1)
        sys.exit(3)
    if world.rank == 0:
        print("second", *facts, store.check(["late"]), flush=True)
    """


def test_attempts_share_no_store_and_no_process(bench: Bench) -> None:
    done = bench.run("run", "-n", 2, "--restarts", 1, bench.script(APART))
    assert done.returncode == 0, done.stderr
    told = {words[0]: words[1:] for line in lines_of(done.stdout, 0) if (words := line.split())}
    (first_id, first_store, first_run, first_count) = told["first"]
    (second_id, second_store, second_run, second_count, has_late_message) = told["second"]
    assert first_id != second_id
    assert first_store != second_store
    assert (first_run, first_count, second_count) == (second_run, "0", "1")
    assert has_late_message == "False"
    assert not any(psutil.pid_exists(int(pid)) for pid in told["pids"])


LEAVES_DAEMONS = """
    import os, subprocess, sys, time
    import lockstep
    lockstep.init()
    if os.environ["LOCKSTEP_RESTARTS"] == "0":
        sys.exit(3)
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    if os.fork() == 0:
        os.setsid()
        time.sleep(1000)
    print("ready", flush=True)
    time.sleep(1000)
    """


def test_launcher_that_is_killed_leaves_nothing_after_a_restart(bench: Bench) -> None:
    run = bench.start("run", "-n", 2, "--restarts", 1, bench.script(LEAVES_DAEMONS))
    assert run.stdout is not None
    for _ in range(2):
        assert "ready" in run.stdout.readline()
    run.kill()
    assert until(lambda: not bench.processes(), 30)


def test_launched_function_is_called_again(tmp_path: Path) -> None:
    def work(world: Any, path: Path) -> int:
        if not path.exists() and world.rank == 1:
            path.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return int(lockstep.reduce(1, "sum"))

    assert lockstep.launch(work, 2, (tmp_path / "begun",), restarts=1) == [2, 2]


def test_launched_function_that_fails_each_time_is_blamed() -> None:
    def work(world: Any) -> None:
        raise ValueError("again")

    with pytest.raises(RankFailed, match="aren't started again") as caught:
        lockstep.launch(work, 2, restarts=1)
    assert caught.value.exit_code == 1
    assert "ValueError: again" in str(caught.value)


@pytest.mark.parametrize("value", [-1, 1.5, "two", True])
def test_numbers_of_restarts_that_make_no_sense(value: Any) -> None:
    with pytest.raises(BadLaunch, match=r"number of restarts is .* whole number from 0"):
        lockstep.launch(print, 2, restarts=value)


def test_threads_are_not_started_again() -> None:
    with pytest.raises(BadLaunch, match="threads can't be started again"):
        lockstep.launch(print, 2, ranks="threads", restarts=1)


def incident(step: int = 0, committed: int | None = None, reason: str = "SIGKILL") -> Incident:
    return Incident(reason, step, committed, is_of_start=False)


def test_run_that_makes_progress_may_fail_for_ever() -> None:
    record = Record(1)
    for step in range(100):
        assert record.judge(incident(10 * step + 3, 10 * step)) is Reaction.RESTART
    assert record.judge(incident(995, 990)) is Reaction.NO_PROGRESS


def test_failure_of_one_reason_at_one_step_is_blamed_whatever_else_happens() -> None:
    record = Record(2)
    text = "ValueError: tensor at 0x7f{} has {} elements"
    steps = [record.judge(incident(7, step, text.format(step, step))) for step in range(3)]
    assert steps == [Reaction.RESTART, Reaction.RESTART, Reaction.SAME_FAILURE]


def test_different_failures_without_progress_are_enough_at_some_time() -> None:
    record = Record(2)
    reactions = [record.judge(incident(step)) for step in range(3)]
    assert reactions == [Reaction.RESTART, Reaction.RESTART, Reaction.NO_PROGRESS]


def test_only_a_first_attempt_can_never_begin() -> None:
    start = Incident("ModuleNotFoundError", 0, None, is_of_start=True)
    assert Record(3).judge(start) is Reaction.NEVER_BEGAN
    record = Record(3)
    record.judge(incident(3))
    assert record.judge(start) is Reaction.RESTART


FORKED = """
    import os, signal, sys, time
    import lockstep
    world = lockstep.init()
    restarts = int(os.environ["LOCKSTEP_RESTARTS"])
    if restarts:
        assert lockstep.reduce(1, "sum") == world.world_size
        sys.exit(0)
    names = [os.readlink(f"/proc/self/fd/{each}") for each in os.listdir("/proc/self/fd")
             if os.path.exists(f"/proc/self/fd/{each}")]
    print(*sorted(name for name in names if "lockstep-snapshot" in name), flush=True)
    time.sleep(1000)
    """


def process_that_forks(bench: Bench, launcher: int) -> psutil.Process:
    """The one child of the launcher that leads no group."""
    (found,) = (
        each
        for each in psutil.Process(launcher).children()
        if os.getpgid(each.pid) == os.getpgid(launcher)
    )
    return found


@pytest.mark.long
@pytest.mark.parametrize("moment", ["before", "after"])
def test_process_that_forks_ranks_is_started_anew_if_it_has_ended(
    bench: Bench, moment: str
) -> None:
    """Before a rank fails, and when it does."""
    run = bench.start("run", "-n", 2, "--restarts", 2, bench.script(FORKED), start_new_session=True)
    assert run.stdout is not None
    told = [run.stdout.readline() for _ in range(2)]
    for line in told:  # each has the files of its own snapshots alone
        rank = line.removeprefix("[rank ")[0]
        found = sorted(set(line.split()) - {"(deleted)", "[rank", f"{rank}]"})
        assert found == [f"/memfd:lockstep-snapshot-{rank}-{slot}" for slot in range(2)]
    forks = process_that_forks(bench, run.pid)
    ranks = [each for each in bench.processes() if is_rank(each, run.pid)]
    victims = [forks, ranks[0]] if moment == "before" else [ranks[0], forks]
    for victim in victims:
        victim.kill()
    _, err = run.communicate(timeout=60)
    assert run.returncode == 0, err
    anew = "The process from which they are forked has ended. It is started anew, in some seconds."
    assert (anew in err) or moment == "after"  # it may have forked them already
    assert "restart 1: rank" in err


def test_process_with_a_thread_or_a_device_is_not_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    thread.start()
    number = len(os.listdir("/proc/self/task"))
    assert zygote.unfit() == f"The process from which they are forked has {number} threads."
    ended.set()
    thread.join()
    monkeypatch.setattr(zygote.os, "listdir", lambda path: ["1"] if "task" in path else ["0"])
    monkeypatch.setattr(zygote.os, "readlink", lambda path: "/dev/nvidia0")
    assert zygote.unfit() == "The process from which they are forked uses /dev/nvidia0."


def test_process_that_may_not_be_forked_is_started_anew_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its answers are planted: a request, and what comes of it."""
    forking = zygote.Forking(Job(b"", 1, 1), (), (), os.getpid())
    lines = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]
    for _, theirs in lines:
        for told in ({"error": "It has 2 threads.", "is_unusable": True}, {"forked": 3}):
            theirs.send(json.dumps(told).encode())
    found = zygote.Zygote(os.getpid(), lines[0][0], forking)

    def start_anew(self: zygote.Zygote) -> None:
        self._line, self._is_unusable = lines[1][0], False

    monkeypatch.setattr(zygote.Zygote, "_start_anew", start_anew)
    said: list[str] = []
    with pytest.raises(LaunchError, match="can't be started again: It has 2 threads"):
        found.take(3, lambda: False, said.append)
    (words,) = said
    assert words.endswith("It has 2 threads. It is started anew, in some seconds.")
    assert [theirs.recv(10) for _, theirs in lines] == [b"3", b"3"]
    for pair in lines:
        for end in pair:
            end.close()


def test_signal_that_no_rank_hears_is_kept_for_the_next_attempt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is said once. A rank that has a handler gets it once."""
    said: list[str] = []
    sent: list[int] = []
    handlers: set[int] = set()
    monkeypatch.setattr(processes, "expects", lambda pid, number: number in handlers)
    pending: list[int] = []
    rank = SimpleNamespace(is_running=True, pid=0, send=sent.append, close=lambda: None)

    def watch() -> Watch:
        found = Watch.__new__(Watch)
        found.__dict__ |= {
            "_job": Job(b"", 1, 1, restarts=1),
            "_ranks": [rank],
            "_kept": set(),
            "_selector": SimpleNamespace(close=lambda: None),
            "console": SimpleNamespace(say=said.append),
            "signals": SimpleNamespace(pending=pending),
        }
        return found

    first = watch()
    for _ in range(3):
        first._pass_on(signal.SIGUSR2)
    first.close()
    assert said == ["SIGUSR2 came, and no rank has a handler for it: it is kept until one has."]
    assert pending == [signal.SIGUSR2]
    handlers.add(signal.SIGUSR2)
    second = watch()
    second._pass_on(pending.pop())
    second.close()
    assert sent == [signal.SIGUSR2]
    assert pending == []
