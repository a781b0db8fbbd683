"""The first rank that fails is named, with how it failed; the others end within five seconds."""

from __future__ import annotations

import re
import signal

import pytest

from lockstep.launcher.job import FAILURE_GRACE_SECONDS
from lockstep.launcher.processes import after_failure
from tests.launcher.bench import Bench, free_port, up_to_thrice

pytestmark = pytest.mark.forks

TRAIN = """
    import ctypes, os, signal, sys, time
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    dist.barrier()

    def fail():
        {failure}

    if rank == 1:
        fail()
    {meanwhile}
    """

IN_A_COLLECTIVE = "dist.all_reduce(torch.ones(1))"

FAILURES = {
    "exception": (
        "raise ValueError('this batch is bad')",
        1,
        ["exit code 1", "in fail", "ValueError: this batch is bad"],
    ),
    "sys.exit": ("sys.exit(3)", 3, ["exit code 3", "in fail", "SystemExit: 3"]),
    "os._exit": (
        "print('out of luck', file=sys.stderr); os._exit(7)",
        7,
        ["exit code 7", "no traceback", "out of luck"],
    ),
    "os._exit(0)": (
        "print('out of luck', file=sys.stderr); os._exit(0)",
        1,
        ["exit code 0 before its program was at the end", "no traceback", "out of luck"],
    ),
    "SIGKILL": ("os.kill(os.getpid(), signal.SIGKILL)", 128 + 9, ["SIGKILL"]),
    "segfault": (
        "ctypes.string_at(0)",
        128 + 11,
        ["SIGSEGV", "Fatal Python error: Segmentation fault", "in fail"],
    ),
}


@pytest.mark.parametrize("kind", FAILURES)
def test_first_failure_is_reported_though_its_peers_fail_too(bench: Bench, kind: str) -> None:
    failure, code, said = FAILURES[kind]
    script = bench.script(TRAIN.format(failure=failure, meanwhile=IN_A_COLLECTIVE))
    done = bench.run("run", "-n", 3, script)
    assert done.returncode == code, done.stderr
    verdict = done.stderr[done.stderr.index("lockstep: ") :]
    assert verdict.startswith("lockstep: rank 1 of 3 failed first")
    for words in said:
        assert words in verdict
    # Only the program's own frames.
    assert "lockstep/launcher" not in verdict
    assert "runpy" not in verdict


@pytest.mark.parametrize("backend", ["shm", "gloo"])
@pytest.mark.parametrize("stop", ["break", pytest.param("sys.exit(0)", marks=pytest.mark.long)])
def test_a_rank_that_stops_alone_is_named_with_its_cause(
    bench: Bench, stop: str, backend: str
) -> None:
    script = bench.script(
        f"""
        import sys
        import lockstep

        world = lockstep.init(backend="{backend}")
        for step in range(3):
            if world.rank == 1 and step == 1:
                {stop}
            lockstep.reduce(step, "sum")
        """
    )
    done = bench.run("run", "-n", 2, script)
    assert done.returncode == 1
    assert "lockstep: rank 0 of 2 failed first: exit code 1. But rank 1 had ended" in done.stderr
    assert "PeerLost: Rank 1 is gone" in done.stderr
    assert done.stderr.count("if lockstep.reduce(stop, 'max'): break") == 1 + (backend == "shm")


def test_message_that_has_no_encoding_is_told_all_the_same(bench: Bench) -> None:
    done = bench.run("run", "-n", 1, bench.script("raise ValueError('bad name: \\udcff')"))
    assert done.returncode == 1
    assert "rank 0 of 1 failed first: exit code 1." in done.stderr
    assert done.stderr.rstrip().endswith("ValueError: bad name: \\udcff")


def test_failure_ends_ranks_that_sleep_and_those_that_will_not_end(bench: Bench) -> None:
    meanwhile = """
    if rank == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        import subprocess
        subprocess.Popen(["sleep", "1000"])
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
    open(f"ready-{rank}", "w").close()
    while True:
        time.sleep(100)
    """
    failure = """
        while not (os.path.exists("ready-0") and os.path.exists("ready-2")):
            time.sleep(0.01)
        print("failing", flush=True)
        # It isn't a daemon, so the failed rank goes on, as any Python program does.
        import threading
        threading.Thread(target=time.sleep, args=(1000,)).start()
        raise RuntimeError("so it goes")
    """
    run = bench.start(
        "run", "-n", 3, bench.script(TRAIN.format(failure=failure, meanwhile=meanwhile))
    )
    assert run.stdout is not None
    assert run.stderr is not None
    assert "failing" in run.stdout.readline()
    assert run.wait(60) == 1
    assert bench.processes() == []
    verdict = run.stderr.read()
    assert "rank 1 of 3 failed first: exit code 1." in verdict
    assert "After it" not in verdict  # who is asked to end hasn't failed


def test_ranks_are_killed_within_five_seconds() -> None:
    """By the plan, not by a clock: the machine of a test may stand still."""
    *before, (number, _) = after_failure(FAILURE_GRACE_SECONDS)
    assert number == signal.SIGKILL
    assert sum(seconds for _, seconds in before) < 5.0


def test_a_forked_process_that_ends_well_does_not_hide_the_failure(bench: Bench) -> None:
    """Its launcher stands still meanwhile, and then reads at once what it was sent."""
    script = bench.script(
        """
        import os, signal, subprocess, sys
        launcher = os.getppid()
        subprocess.Popen(["sh", "-c", f"sleep 0.7; kill -CONT {launcher}"])
        os.kill(launcher, signal.SIGSTOP)
        if os.fork() == 0:
            sys.exit(0)
        os.wait()
        raise ValueError("the reason")
        """
    )
    done = bench.run("run", "-n", 1, script)
    assert done.returncode == 1
    assert "ValueError: the reason" in done.stderr


def test_what_a_rank_started_ends_with_a_run_that_went_well(bench: Bench) -> None:
    script = bench.script(
        """
        import subprocess
        subprocess.Popen(["sleep", "1000"])
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
        """
    )
    done = bench.run("run", "-n", 2, script, seconds=100)
    assert done.returncode == 0
    assert bench.processes() == []


@pytest.mark.parametrize(
    ("argument", "code"), [("None", 0), ("0", 0), ("'no data'", 1), ("256 + 5", 5), ("-1", 255)]
)
def test_sys_exit_means_what_it_means_to_python(argument: str, code: int) -> None:
    from lockstep.launcher.failures import exit_code_of

    error = SystemExit(eval(argument))
    assert exit_code_of(error, of_function=False) == code


@up_to_thrice
def test_a_failed_rank_may_run_its_exit_handlers(bench: Bench) -> None:
    """It takes them longer than the launcher waits before it ends the others."""
    script = bench.script(
        """
        import atexit, os, time
        if os.environ["RANK"] == "1":
            atexit.register(lambda: (time.sleep(1.5), print("closed the log")))
            raise RuntimeError("oh")
        time.sleep(1000)
        """
    )
    done = bench.run("run", "-n", 2, script)
    assert "closed the log" in done.stdout
    assert done.returncode == 1


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_stopped_rank_is_named_and_not_who_waited_for_it(bench: Bench, backend: str) -> None:
    """Over Gloo, too, whose errors of a timeout name nobody."""
    script = bench.script(
        f"""
        import os, signal
        from datetime import timedelta
        import lockstep, torch
        import torch.distributed as dist
        world = lockstep.init(backend="{backend}", timeout=timedelta(seconds=20))
        dist.barrier()
        brief = dist.new_group(timeout=timedelta(seconds=0.5))
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.all_reduce(torch.ones(1), group=brief)
        """
    )
    done = bench.run("run", "-n", 2, script)
    assert done.returncode == 1
    said = "lockstep: rank 1 of 2 failed first: it was stopped, as by SIGSTOP"
    assert done.stderr.startswith(said), done.stderr
    assert "Rank 0, which waited for it:\n" in done.stderr
    assert "dist.all_reduce(torch.ones(1), group=brief)" in done.stderr


def test_stopped_rank_is_named_on_each_host(bench: Bench) -> None:
    script = bench.script(
        """
        import os, signal
        from datetime import timedelta
        import torch
        import torch.distributed as dist
        dist.init_process_group("gloo")
        brief = dist.new_group(timeout=timedelta(seconds=0.5))
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.all_reduce(torch.ones(1), group=brief)
        """
    )
    common = ["--nnodes", 2, "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "-n", 1, script]
    for run in [bench.start("run", "--node-rank", host, *common) for host in range(2)]:
        _, err = run.communicate(timeout=60)
        assert run.returncode == 1
        assert err.startswith("lockstep: rank 1 of 2 failed first: it was stopped"), err


def test_a_rank_that_others_lost_may_tell_why(bench: Bench) -> None:
    """Its time was up, which ended its connections, and it is slow to say so."""
    script = bench.script(
        """
        import os, time
        from lockstep.errors import CollectiveTimeout, PeerLost
        rank = int(os.environ["RANK"])
        if rank == 1:
            raise PeerLost("Rank 0 is gone; rank 1 waited for it.", [0], "all_reduce")
        time.sleep(1 if rank == 0 else 60)
        raise CollectiveTimeout("Rank 2 did not come in time.", [2], "all_reduce")
        """
    )
    done = bench.run("run", "-n", 3, script)
    assert done.stderr.startswith("lockstep: rank 2 of 3 did not come to where others waited")


@pytest.mark.parametrize("options", [[], ["--restarts", 1]], ids=["once", "started again"])
def test_where_a_rank_was_that_did_not_come(bench: Bench, options: list) -> None:
    script = bench.script(
        """
        import time
        from datetime import timedelta
        import torch
        import torch.distributed as dist
        import lockstep

        world = lockstep.init(backend="shm", timeout=timedelta(seconds=2))

        def read_all_samples():
            time.sleep(60)

        if world.rank == 1:
            read_all_samples()
        dist.all_reduce(torch.ones(1))
        """
    )
    done = bench.run("run", "-n", 2, *options, script)
    assert "rank 1 of 2 did not come to where others waited" in done.stderr
    assert re.search(r"^Rank 1 was at \S+:\d+, in read_all_samples\.$", done.stderr, re.M)
