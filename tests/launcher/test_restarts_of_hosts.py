"""Ranks of several hosts are started again together, and a host that is gone may come back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch.distributed as dist

from lockstep.launcher import START_AGAIN
from lockstep.launcher.hosts import Host
from tests.launcher.bench import Bench, free_port, lines_of
from tests.network import hosts_of_a_network
from tests.waiting import until, until_line

pytestmark = pytest.mark.forks

TRAINS = """
    import hashlib, os, sys, time
    import torch
    from torch import nn
    from torch.utils.data import TensorDataset
    import lockstep
    import torch.distributed as dist

    world = lockstep.init()
    store = dist.distributed_c10d._get_default_store()
    restarts = int(os.environ["LOCKSTEP_RESTARTS"])
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 40), nn.Dropout(0.2), nn.Linear(40, 2))
    lockstep.parallelize(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    if sys.argv[1] == "sharded":
        lockstep.shard_optimizer(optimizer)
    x = torch.randn(60, 6, generator=torch.Generator().manual_seed(1))
    loader = lockstep.DataLoader(TensorDataset(x, x[:, 0].gt(0).long()), 12, seed=2, shuffle=True)
    things = dict(model=model, optimizer=optimizer)
    steps = lockstep.steps(loader, "run", epochs=4, save_every=5, snapshot_every=1, **things)
    waits = False
    late = store.check(["late"])
    lockstep.reduce(1)
    store.set("late", "a message of this attempt")
    print(f"attempt {restarts} from {steps.step} {late}", flush=True)
    for x, y in steps:
        lockstep.mean(nn.functional.cross_entropy(model(x), y, reduction="none")).backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(float(os.environ.get("SLEEP", 0)))
        while steps.step == 8 and restarts == int(os.environ.get("WAITS", -1)):
            lockstep.reduce(1)
            if not waits:
                print("waiting", flush=True)
            waits = True
            time.sleep(0.05)
    tensors = model.state_dict().values()
    digest = hashlib.sha256(b"".join(each.numpy().tobytes() for each in tensors)).hexdigest()
    print("bits", digest, flush=True)
    """


class TwoHosts:
    """A run of it on two hosts, which are started one by one."""

    def __init__(self, bench: Bench, kind: str = "plain", *options: object) -> None:
        self._bench, self._script = bench, bench.script(TRAINS)
        self._kind, self._options = kind, options
        self.address = f"127.0.0.1:{free_port()}"
        self.on: list[list[str]] = [[], []]

    def start(self, host: int, **variables: str) -> subprocess.Popen[str]:
        words = ["run", "--nnodes", 2, "--node-rank", host, "--rdzv-endpoint", self.address, "-n",
                 1, "--restarts", 2, *self._options, self._script, self._kind]  # fmt: skip
        command = [*self.on[host], sys.executable, "-m", "lockstep", *map(str, words)]
        environment = {**os.environ, **variables}
        if not self.on[host]:
            return self._bench.start(*words, env=environment)
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(
            command, text=True, cwd=self._bench.directory, env=environment, **pipes
        )

    def waiting(self) -> list[subprocess.Popen[str]]:
        """Both hosts, when their ranks wait in step 8 of the first attempt."""
        runs = [self.start(host, WAITS="0") for host in range(2)]
        for run in runs:
            until_line("waiting", run)
        return runs

    def undisturbed(self) -> str:
        runs = [self.start(host) for host in range(2)]
        (bits,) = {lines(run, host)[-1] for host, run in enumerate(runs)}
        assert bits.startswith("bits")
        remove(self._bench.directory / "run")
        return bits


def lines(run: subprocess.Popen[str], host: int) -> list[str]:
    out, err = run.communicate(timeout=100)
    assert run.returncode == 0, err
    return lines_of(out, host)


def rank_below(launcher: int) -> psutil.Process:
    """The one rank of a launcher, or of the command that starts it: a child that leads a group."""
    found = [
        each
        for each in psutil.Process(launcher).children(recursive=True)
        if os.getpgid(each.pid) == each.pid != os.getsid(each.pid)
    ]
    (rank,) = found
    return rank


@pytest.mark.parametrize("host", [1, pytest.param(0, marks=pytest.mark.long)])
def test_a_rank_that_is_killed_on_one_host_costs_no_bit_on_both(bench: Bench, host: int) -> None:
    hosts = TwoHosts(bench, "sharded")
    expected = hosts.undisturbed()
    runs = hosts.waiting()
    rank_below(runs[host].pid).kill()
    for number, run in enumerate(runs):
        out, err = run.communicate(timeout=100)
        assert run.returncode == 0, err
        # The store has no message of the attempt before.
        assert lines_of(out, number) == ["attempt 1 from 8 False", expected]
        assert f"restart 1: rank {host} of 2 failed in step" in err
        assert "(SIGKILL); all go on from step 8." in err


@pytest.mark.long
def test_host_that_is_killed_whole_may_come_back(bench: Bench) -> None:
    hosts = TwoHosts(bench, "sharded")
    expected = hosts.undisturbed()
    runs = hosts.waiting()
    # It waits as long as there is one. Started later, it would be a child of the process that
    # adopts those of the launcher.
    again = hosts.start(1)
    time.sleep(1)
    runs[1].kill()
    # Host 0 has copies of its snapshots.
    assert lines(again, 1) == ["attempt 1 from 8 False", expected]
    out, err = runs[0].communicate(timeout=100)
    assert runs[0].returncode == 0, err
    assert lines_of(out, 0) == ["attempt 1 from 8 False", expected]
    assert "(host 1 is lost); all go on from the last snapshot of which another host has" in err


@pytest.mark.long
def test_host_that_does_not_come_back_is_not_waited_for_for_ever(bench: Bench) -> None:
    runs = TwoHosts(bench, "plain", "--rdzv-timeout", 5).waiting()
    runs[1].kill()
    _, err = runs[0].communicate(timeout=100)
    assert runs[0].returncode == START_AGAIN, err
    assert "2 hosts didn't meet" in err
    assert "within 5 seconds: host 1 didn't come" in err
    assert "The state after 8 steps was written in" in err
    assert until(lambda: not bench.processes())


@pytest.mark.long
def test_without_host_0_the_run_ends_and_goes_on_when_it_is_given_again(bench: Bench) -> None:
    hosts = TwoHosts(bench)
    expected = hosts.undisturbed()
    runs = hosts.waiting()
    runs[0].kill()
    _, err = runs[1].communicate(timeout=100)
    assert runs[1].returncode == START_AGAIN, err
    assert "host 0" in err
    assert "is lost" in err
    assert "The state after 8 steps was written in" in err  # host 1 has copies of the snapshots
    assert "restart 1" not in err
    assert until(lambda: not bench.processes())
    runs = [hosts.start(host) for host in range(2)]
    for host, run in enumerate(runs):
        assert lines(run, host) == ["attempt 0 from 8 False", expected]


@pytest.mark.long
def test_hosts_that_have_saved_are_to_be_started_again(bench: Bench) -> None:
    """A signal at one of them stops the ranks of both in one step."""
    hosts = TwoHosts(bench)
    expected = hosts.undisturbed()
    runs = [hosts.start(host, SLEEP="0.3") for host in range(2)]
    for run in runs:
        until_line("attempt 0", run)
    runs[1].send_signal(signal.SIGTERM)
    for run in runs:
        _, err = run.communicate(timeout=100)
        assert run.returncode == START_AGAIN, err
        assert "stopped by SIGTERM and saved" in err
    runs = [hosts.start(host) for host in range(2)]
    first, second = (lines(run, host) for host, run in enumerate(runs))
    assert first == second
    assert first[1] == expected
    assert 1 <= int(first[0].split()[3]) < 20


@pytest.mark.long
def test_the_last_snapshot_of_two_hosts_is_written_by_host_0(bench: Bench) -> None:
    """Their ranks don't come to a step's end before the grace is over."""
    hosts = TwoHosts(bench, "sharded", "--grace", 1)
    expected = hosts.undisturbed()
    runs = hosts.waiting()
    runs[1].send_signal(signal.SIGTERM)
    said = [run.communicate(timeout=100)[1] for run in runs]
    assert [run.returncode for run in runs] == [START_AGAIN, 128 + signal.SIGTERM], said
    assert "The state after 8 steps was written in" in said[0]
    runs = [hosts.start(host) for host in range(2)]
    for host, run in enumerate(runs):
        assert lines(run, host) == ["attempt 0 from 8 False", expected]


@pytest.mark.parametrize("host", [0, pytest.param(1, marks=pytest.mark.long)])
def test_signal_while_hosts_agree_on_the_outcome_ends_both(bench: Bench, host: int) -> None:
    """One is suspended meanwhile, and the other has a rank that failed."""
    runs = TwoHosts(bench).waiting()
    runs[1 - host].send_signal(signal.SIGSTOP)
    rank_below(runs[host].pid).kill()
    time.sleep(1)
    runs[host].send_signal(signal.SIGTERM)
    time.sleep(0.7)
    runs[1 - host].send_signal(signal.SIGCONT)
    for number, run in enumerate(runs):
        out, err = run.communicate(timeout=100)
        assert not lines_of(out, number), err  # no attempt follows
        assert f"rank {host} of 2 failed first" in err
        # The other host may hear of the signal as its ranks are ended: it tells the failure alone.
        codes = {128 + signal.SIGTERM} | ({128 + signal.SIGKILL} if number != host else set())
        if number == 0 and "The state after 8 steps was written in" in err:  # for both
            assert run.returncode == START_AGAIN, err
        else:
            assert run.returncode in codes, err
            assert ("ended by SIGTERM" in err) == (run.returncode == 128 + signal.SIGTERM)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["plain", "sharded"])
def test_hosts_of_a_network_lose_no_bit(bench: Bench, kind: str) -> None:
    """A rank is killed, and then a whole host, which comes back."""
    with hosts_of_a_network(2) as network:
        hosts = TwoHosts(bench, kind)
        hosts.address, hosts.on = f"{network.address(0)}:29500", [*map(network.on, range(2))]
        expected = hosts.undisturbed()
        runs = hosts.waiting()
        rank_below(runs[1].pid).kill()
        for host, run in enumerate(runs):
            assert lines(run, host)[-2:] == ["attempt 1 from 8 False", expected]
        remove(bench.directory / "run")
        runs = hosts.waiting()
        launcher = psutil.Process(runs[1].pid)
        for each in [launcher, *launcher.children(recursive=True)]:
            each.kill()
        again = hosts.start(1)
        assert lines(again, 1) == ["attempt 1 from 8 False", expected]
        assert lines(runs[0], 0)[-2:] == ["attempt 1 from 8 False", expected]
        runs[1].communicate(timeout=100)


def remove(folder: Path) -> None:
    for file in folder.glob("0*/*"):
        file.unlink()
    for checkpoint in folder.glob("0*"):
        checkpoint.rmdir()


class Answers(dist.Store):
    """A store that gives the decision, and nothing after it."""

    def get(self, key: str) -> bytes:
        return b"a decision"

    def check(self, keys: list[str]) -> bool:
        return False

    def add(self, key: str, number: int) -> int:
        time.sleep(2)
        raise RuntimeError("the network was cut")


def test_a_decision_that_host_0_does_not_hear_was_heard_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lockstep.launcher.hosts._DECIDE_SECONDS", 0.2)
    host = Host.__new__(Host)
    store = Answers()
    host.__dict__ |= {"_agreement": True, "_store": store, "_root": store, "attempt": 0}
    host.__dict__ |= {"_endpoint": SimpleNamespace(is_held=False), "_number": 1}
    assert host.decide("", is_restart=True, lost=None) == "a decision"
