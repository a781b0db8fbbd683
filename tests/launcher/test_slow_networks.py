"""Two hosts between which packets take long, get lost, or are lost for good without a word."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Iterator

import pytest

from tests.launcher.bench import Bench
from tests.network import Hosts, hosts_of_a_network, start_on

pytestmark = [pytest.mark.forks, pytest.mark.long, pytest.mark.network]

DELAY_SECONDS = 0.05
TRAIN = """
    import os, sys, time, torch, torch.distributed as dist, lockstep

    lockstep.init()
    model = lockstep.parallelize(torch.nn.Linear(100, 100))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    end, step, go_on = time.monotonic() + SECONDS, 0, True
    while go_on:
        optimizer.zero_grad()
        model(torch.ones(2, 100)).sum().backward()
        optimizer.step()
        step += 1
        if step == 3:
            print("training", flush=True)
            if "FAIL" in os.environ and os.environ["RANK"] == "3":
                raise ValueError("here it failed")
        go_on = lockstep.reduce(float(time.monotonic() < end), "max") > 0
    print("trained", flush=True)
    """


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with hosts_of_a_network(2) as hosts:
        yield hosts


def until_training(launcher: object) -> None:
    for _ in range(2):
        assert "training" in launcher.stdout.readline()  # type: ignore[attr-defined]


@pytest.mark.parametrize(("delay_seconds", "loss"), [(0.2, 0.0), (0.05, 0.03)])
def test_slow_network_is_no_failure(
    bench: Bench, hosts: Hosts, delay_seconds: float, loss: float
) -> None:
    script = bench.script(TRAIN.replace("SECONDS", "15"))
    with hosts.slow_cable(1, delay_seconds, loss):
        for run in start_on(hosts, script, "--host-timeout", "10"):
            out, err = run.communicate(timeout=200)
            assert run.returncode == 0, err
            assert out.count("trained") == 2


def test_rank_that_fails_is_named_over_a_slow_network(
    bench: Bench, hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAIL", "1")
    with hosts.slow_cable(1, DELAY_SECONDS):
        for run in start_on(hosts, bench.script(TRAIN.replace("SECONDS", "1000"))):
            _, err = run.communicate(timeout=200)
            assert run.returncode == 1, err
            assert "lockstep: rank 3 of 4 failed first: exit code 1" in err


def test_stalled_connection_is_named_on_both_hosts(bench: Bench, hosts: Hosts) -> None:
    script = bench.script(TRAIN.replace("SECONDS", "1000"))
    with hosts.slow_cable(1, DELAY_SECONDS) as cable:
        runs = start_on(hosts, script, "--host-timeout", "6")
        for run in runs:
            until_training(run)
        cable.send_signal(signal.SIGUSR1)
        began = time.monotonic()
        for host, run in enumerate(runs):
            _, err = run.communicate(timeout=100)
            assert run.returncode == 1, err
            assert f"lockstep: host {1 - host} ({socket.gethostname()}) is lost: it fell" in err
        assert time.monotonic() - began < 6 + 8


def test_killed_launcher_is_named_over_a_slow_network(bench: Bench, hosts: Hosts) -> None:
    script = bench.script(TRAIN.replace("SECONDS", "1000"))
    with hosts.slow_cable(1, DELAY_SECONDS):
        runs = start_on(hosts, script)
        for run in runs:
            until_training(run)
        runs[1].kill()
        began = time.monotonic()
        _, err = runs[0].communicate(timeout=100)
        runs[1].communicate()
        assert runs[0].returncode == 1, err
        assert f"lockstep: host 1 ({socket.gethostname()}) is lost: the connection of its" in err
        assert time.monotonic() - began < 6
