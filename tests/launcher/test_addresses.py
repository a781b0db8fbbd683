"""Hosts of a network find addresses by which they reach each other, whatever names resolve to."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack

import pytest

from tests.launcher.bench import Bench, lines_of
from tests.network import Hosts, hosts_of_a_network

pytestmark = pytest.mark.long

# The default group, and one of torch's own; and where Gloo listens.
TOTAL = """
    import os, socket, psutil, torch, torch.distributed as dist, lockstep

    world = lockstep.init(backend=os.environ.get("BACKEND"))
    total = torch.tensor(float(world.rank + 1))
    for group in (None, dist.new_group(backend="gloo")):
        dist.all_reduce(total, group=group)
    places = psutil.Process().net_connections()
    own = {place.laddr.ip for place in places if place.status == psutil.CONN_LISTEN}
    print(total.item() / world.world_size, *own, os.environ["GLOO_SOCKET_IFNAME"], flush=True)
    """


def run_on(
    bench: Bench,
    hosts: Hosts,
    endpoint: str,
    *options: Sequence[object],
    environs: Sequence[Mapping[str, str]] = ({}, {}),
    seconds: int = 60,
) -> list[tuple[int, str, str]]:
    """The exit status and output of a launcher on each of the ``hosts``, of two ranks each."""
    script = bench.script(TOTAL)
    runs = [
        subprocess.Popen(
            [*hosts.on(host), sys.executable, "-m", "lockstep", "run", "-n", "2",
             "--nnodes", str(len(environs)), "--rdzv-endpoint", endpoint, "--rdzv-timeout", "30",
             *map(str, options[host] if options else ["--node-rank", host]), str(script)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environ},
        )
        for host, environ in enumerate(environs)
    ]  # fmt: skip
    ended = []
    with ExitStack() as stack:
        for run in runs:
            stack.callback(run.kill)
        for run in runs:
            out, err = run.communicate(timeout=seconds)
            ended.append((run.returncode, out, err))
    return ended


def check(ended: Sequence[tuple[int, str, str]], own: Sequence[str]) -> None:
    """All ranks have met, and those of each host listen at its address of ``own`` alone."""
    for host, (status, out, err) in enumerate(ended):
        assert status == 0, err
        for rank in (2 * host, 2 * host + 1):
            assert lines_of(out, rank) == [f"10.0 {own[host]} cable"]


@pytest.fixture
def hosts_of_ipv6() -> Iterator[Hosts]:
    """Two hosts that have IPv4 as well, which isn't routed between them."""
    with hosts_of_a_network(2, (6,)) as hosts:
        for host in range(2):
            hosts.add_address(host, f"10.0.{host}.1/32")
        yield hosts


@pytest.mark.parametrize("backend", [None, "gloo"])
def test_ipv6_beside_ipv4_that_is_not_routed(
    bench: Bench, hosts_of_ipv6: Hosts, backend: str | None
) -> None:
    environ = {} if backend is None else {"BACKEND": backend}
    endpoint = f"[{hosts_of_ipv6.address6(0)}]:29500"
    ended = run_on(bench, hosts_of_ipv6, endpoint, environs=(environ, environ))
    check(ended, [hosts_of_ipv6.address6(host) for host in range(2)])


def test_address_that_both_hosts_have_is_no_way_from_one_to_the_other(bench: Bench) -> None:
    """As the bridges of containers have one."""
    with hosts_of_a_network(2) as hosts:
        for host in range(2):
            hosts.add_address(host, "172.17.0.1/16")
        endpoint = f"{hosts.address(0)}:29500"
        check(run_on(bench, hosts, endpoint), [hosts.address(host) for host in range(2)])
