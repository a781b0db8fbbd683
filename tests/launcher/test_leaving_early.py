"""A rank that ends without coming to where others wait is told of at once, on all hosts."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.launcher.bench import Bench
from tests.network import hosts_of_a_network, start_on

pytestmark = pytest.mark.forks

SECONDS = 150  # init() has ten minutes
SCRIPT = """
    import os
    if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        {leave}
    import lockstep
    lockstep.init()
    """


@pytest.mark.parametrize(
    ("leave", "said"),
    [
        ("os._exit(0)", "rank 1 of 2 failed first: it ended with exit code 0 before its program"),
        ("raise SystemExit", "rank 1 of 2 did not come to where others waited"),
    ],
)
def test_rank_that_leaves_before_init_is_named_at_once(leave: str, said: str, bench: Bench) -> None:
    script = bench.script(SCRIPT.format(leave=leave))
    command = [sys.executable, "-m", "lockstep", "run", "-n", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 1
    assert said in done.stderr


def test_rank_of_another_host_that_leaves_before_init_is_named_at_once(bench: Bench) -> None:
    script = bench.script(SCRIPT.format(leave="os._exit(0)"))
    with hosts_of_a_network(2) as hosts:
        for launcher in start_on(hosts, script):
            _, said = launcher.communicate(timeout=SECONDS)
            assert launcher.returncode == 1
            assert "rank 3 of 4 failed first: it ended with exit code 0 before" in said


def test_ranks_that_have_met_may_end_while_others_meet_again(bench: Bench) -> None:
    """Those who came before they ended were there."""
    script = bench.script(
        """
        import os, time
        import torch.distributed as dist
        from datetime import timedelta
        from lockstep.world.environment import detect
        from lockstep.world.rendezvous import ended_ranks, meet, roll_call
        place = detect(os.environ)
        root = meet(place, timedelta(seconds=60))
        store = dist.PrefixStore("a", root)
        if place.rank == 0:
            while not ended_ranks(root, place):
                time.sleep(0.02)
            assert roll_call(store, place, timedelta(seconds=60), "x") == ["x", "y"]
            print("met")
        else:
            store.set("present/1", "y")
        """
    )
    command = [sys.executable, "-m", "lockstep", "run", "-n", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert (done.returncode, "met" in done.stdout) == (0, True), done.stderr
