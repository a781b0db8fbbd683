"""Two hosts of a network: what crosses the cable between them, and that it is cut."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launcher.bench import Bench, lines_of
from tests.network import Hosts, hosts_of_a_network, start_on

pytestmark = [pytest.mark.forks, pytest.mark.long]


@pytest.fixture
def two_hosts() -> Iterator[Hosts]:
    with hosts_of_a_network(2) as hosts:
        yield hosts


INIT = """
    import torch, torch.distributed as dist, lockstep
    world = lockstep.init()
    total = torch.tensor(float(world.rank + 1))
    dist.all_reduce(total)
    print(world.local_rank, world.local_world_size, world.world_size, total.item(), flush=True)
    """


def test_two_hosts_of_a_network(bench: Bench, two_hosts: Hosts) -> None:
    for number, run in enumerate(start_on(two_hosts, bench.script(INIT))):
        out, err = run.communicate(timeout=100)
        assert run.returncode == 0, err
        for local_rank in range(2):
            assert lines_of(out, 2 * number + local_rank) == [f"{local_rank} 2 4 10.0"]


def _start_by_hand(hosts: Hosts, rank: int, script: Path) -> subprocess.Popen[str]:
    """Start one rank of two, on the host of its number."""
    told = {"MASTER_ADDR": hosts.address(0), "MASTER_PORT": "29500", "WORLD_SIZE": "2"}
    words = [f"{name}={value}" for name, value in {**told, "RANK": str(rank)}.items()]
    return subprocess.Popen(
        [*hosts.on(rank), "env", *words, sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_hosts_of_one_name_are_different_hosts(bench: Bench, two_hosts: Hosts) -> None:
    """No starter tells the local ranks here, and the kernel is one."""
    script = bench.script(INIT)
    ranks = [_start_by_hand(two_hosts, rank, script) for rank in range(2)]
    for rank in ranks:
        out, err = rank.communicate(timeout=100)
        assert rank.returncode == 0, err
        assert out == "0 1 2 3.0\n"


@pytest.mark.parametrize("starter", ["lockstep run", "none"])
def test_hosts_that_are_copies_are_different_hosts(
    bench: Bench, two_hosts: Hosts, starter: str
) -> None:
    """As virtual machines that go on from one snapshot: all that can be read of them is equal."""
    as_copy = """
    import torch  # which loads lockstep's backends, and they what follows
    from lockstep.comm import network
    from lockstep.world import reach
    network.this_kernel = reach.this_kernel = lambda namespace: f"a kernel and its {namespace}"
    """
    script = bench.script(as_copy + INIT)
    if starter == "none":
        ranks = [_start_by_hand(two_hosts, rank, script) for rank in range(2)]
        expected = {0: "0 1 2 3.0", 1: "0 1 2 3.0"}
    else:
        ranks = start_on(two_hosts, script)
        expected = {0: "0 2 4 10.0", 1: "0 2 4 10.0"}
    for number, rank in enumerate(ranks):
        out, err = rank.communicate(timeout=60)
        assert rank.returncode == 0, err
        assert expected[number] in out


def test_copies_are_different_hosts_for_torchs_init_process_group(
    bench: Bench, two_hosts: Hosts
) -> None:
    script = bench.script(
        """
        import os, torch, torch.distributed as dist
        from lockstep.comm import network, register_backends
        os.environ["GLOO_SOCKET_IFNAME"] = "cable"  # as torch asks for: init() finds it itself
        network.this_kernel = lambda namespace: f"a kernel and its {namespace}"
        register_backends()
        dist.init_process_group("shm")
        total = torch.tensor(float(dist.get_rank() + 1))
        dist.all_reduce(total)
        print(total.item(), flush=True)
        """
    )
    for number, run in enumerate(start_on(two_hosts, script)):
        out, err = run.communicate(timeout=100)
        assert run.returncode == 0, err
        assert lines_of(out, 2 * number) == ["10.0"]


@pytest.mark.parametrize("versions", [(6,), (4, 6)])
def test_two_hosts_of_a_network_of_ipv6(bench: Bench, versions: tuple[int, ...]) -> None:
    with hosts_of_a_network(2, versions) as hosts:
        address = f"[{hosts.address6(0)}]"
        for number, run in enumerate(start_on(hosts, bench.script(INIT), address=address)):
            out, err = run.communicate(timeout=100)
            assert run.returncode == 0, err
            assert lines_of(out, 2 * number) == ["0 2 4 10.0"]


def test_host_without_loopback(bench: Bench, two_hosts: Hosts) -> None:
    """Ranks of one host meet without; of several hosts, the first is told what is wrong."""
    subprocess.run([*two_hosts.on(0), "ip", "link", "set", "lo", "down"], check=True)
    script = str(bench.script(INIT))
    run = [*two_hosts.on(0), sys.executable, "-m", "lockstep", "run", "-n", "2"]
    endpoint = ["--nnodes", "2", "--rdzv-endpoint", f"{two_hosts.address(0)}:29500"]
    alone = subprocess.run([*run, script], capture_output=True, text=True, timeout=60)
    assert alone.returncode == 0, alone.stderr
    assert lines_of(alone.stdout, 1) == ["1 2 2 3.0"]
    assert alone.stderr == ""
    options = [*endpoint, "--node-rank", "0", script]
    first = subprocess.run([*run, *options], capture_output=True, text=True, timeout=60)
    assert first.returncode == 2
    assert "this host doesn't reach itself at 10.77.0.1" in first.stderr
    assert "Traceback" not in first.stderr


COUNT_BYTES = """
    from pathlib import Path
    import torch, torch.distributed as dist, lockstep

    def sent():
        lines = map(str.split, Path("/proc/net/dev").read_text().splitlines())
        return sum(int(words[9]) for words in lines if words[0] == "cable:")

    world = lockstep.init()
    gloo = dist.new_group(backend="gloo")
    size = 4 * 1024 * 1024
    for name, group in (("shm", dist.group.WORLD), ("gloo", gloo)):
        tensor = torch.full((size // 4,), world.rank + 1.0)
        dist.all_reduce(tensor, group=group)  # connections are made
        assert tensor.eq(10).all()
        dist.barrier(group)
        before = sent()
        for _ in range(5):
            dist.all_reduce(tensor, group=group)
        dist.barrier(group)
        if world.local_rank == 0:
            print(name, (sent() - before) / 5 / size, flush=True)
        dist.barrier(group)
    """


def test_a_host_sends_each_byte_once(bench: Bench, two_hosts: Hosts) -> None:
    """Of four ranks on two hosts; with Gloo alone, more crosses the cable."""
    for number, run in enumerate(start_on(two_hosts, bench.script(COUNT_BYTES))):
        out, err = run.communicate(timeout=100)
        assert run.returncode == 0, err
        shares = dict(line.split() for line in lines_of(out, 2 * number))
        # Headers and acknowledgements come on top of the bytes themselves.
        assert 1.0 < float(shares["shm"]) < 1.05, shares
        assert float(shares["gloo"]) > 1.2, shares


TRAIN = """
    import time, torch, torch.distributed as dist, lockstep
    from datetime import timedelta

    lockstep.init(timeout=timedelta(seconds=SECONDS))
    total, step = torch.ones(4), 0
    while True:
        dist.all_reduce(total)
        step += 1
        if step == 3:
            print("training", flush=True)
        time.sleep(0.02)
    """


def await_training(runs: list[subprocess.Popen[str]]) -> None:
    for run in runs:
        assert run.stdout is not None
        assert "training" in run.stdout.readline()


@pytest.mark.parametrize(("seconds", "silence", "at_most"), [(15, 60, 30), (600, 5, 15)])
def test_cut_link_ends_all_hosts_and_each_names_the_other(
    bench: Bench, two_hosts: Hosts, seconds: int, silence: int, at_most: int
) -> None:
    """After the timeout of a collective, or once too long nothing was heard of the other."""
    script = bench.script(TRAIN.replace("SECONDS", str(seconds)))
    runs = start_on(two_hosts, script, "--host-timeout", str(silence))
    await_training(runs)
    began = time.monotonic()
    two_hosts.cut(1)
    for host, run in enumerate(runs):
        _, err = run.communicate(timeout=at_most + 30)
        assert run.returncode == 1, err
        assert f"lockstep: host {1 - host} ({socket.gethostname()}) is lost: it fell" in err
    assert time.monotonic() - began < at_most


@pytest.mark.parametrize("host", [0, 1])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_end_of_a_launcher_is_told_and_not_that_its_ranks_are_gone(
    bench: Bench, two_hosts: Hosts, host: int, number: signal.Signals
) -> None:
    runs = start_on(two_hosts, bench.script(TRAIN.replace("SECONDS", "600")))
    await_training(runs)
    runs[host].send_signal(number)
    runs[host].communicate(timeout=60)
    _, err = runs[1 - host].communicate(timeout=60)
    name, code = f"host {host} ({socket.gethostname()})", runs[1 - host].returncode
    if number == signal.SIGINT:
        assert (runs[host].returncode, code) == (130, 130), err
        assert f"lockstep: ended by SIGINT at {name}" in err
    else:
        assert code == 1
        assert f"lockstep: {name} is lost" in err


MEET = """
    import time, lockstep
    from datetime import timedelta

    began = time.monotonic()
    try:
        lockstep.init(timeout=timedelta(seconds=SECONDS))
    finally:
        print("took", time.monotonic() - began)
    """


@pytest.mark.parametrize("is_silent", [True, False])
def test_host_behind_a_nat_is_named_in_time(
    bench: Bench, two_hosts: Hosts, is_silent: bool
) -> None:
    """It meets the other, which can't connect to it: what it sends there is lost, or refused."""
    inside, seconds = "192.168.5.2", 8
    if is_silent:
        enter = [*two_hosts.on(0), "ip"]
        nowhere = [inside, "lladdr", "02:00:00:00:00:99", "dev", "cable"]
        subprocess.run([*enter, "route", "add", "192.168.5.0/24", "dev", "cable"], check=True)
        subprocess.run([*enter, "neigh", "add", *nowhere], check=True)
    why = "no answer within 2 s" if is_silent else "Network is unreachable"
    script = bench.script(MEET.replace("SECONDS", str(seconds)))
    with two_hosts.translated(1, inside):
        for run in start_on(two_hosts, script):
            out, err = run.communicate(timeout=100)
            assert run.returncode == 1
            assert f"doesn't reach host 1 ({socket.gethostname()}) at {inside} ({why})" in err, err
            assert f"Connections came from {two_hosts.address(1)}, which is no host's" in err, err
            assert "GLOO_SOCKET_IFNAME" in err
            took = [float(line.split()[-1]) for line in out.splitlines() if "took" in line]
            assert took
            assert max(took) < seconds
