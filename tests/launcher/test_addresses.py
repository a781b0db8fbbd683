"""Hosts of a network find addresses by which they reach each other, whatever names resolve to."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.launcher.bench import Bench, lines_of
from tests.network import Hosts, hosts_of_a_network
from tests.waiting import until

pytestmark = [pytest.mark.forks, pytest.mark.long]

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
    text: str = TOTAL,
) -> list[tuple[int, str, str]]:
    """The exit status and output of a launcher on each of the ``hosts``, of two ranks each."""
    given = options or [["--node-rank", host] for host in range(len(environs))]
    runs = [
        start(bench, hosts, host, endpoint, given[host], environ, text)
        for host, environ in enumerate(environs)
    ]
    return communicate(runs)


def start(
    bench: Bench,
    hosts: Hosts,
    host: int,
    endpoint: str,
    options: Sequence[object] | None = None,
    environ: Mapping[str, str] | None = None,
    text: str = TOTAL,
) -> subprocess.Popen[str]:
    """A launcher on ``host``, which is number ``host`` unless there are ``options``."""
    options = ["--node-rank", host] if options is None else options
    return hosts.start(
        host,
        [sys.executable, "-m", "lockstep", "run", "-n", "2",
         "--nnodes", "2", "--rdzv-endpoint", endpoint, "--rdzv-timeout", "30",
         *map(str, options), str(bench.script(text))],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **(environ or {})},
    )  # fmt: skip


def communicate(runs: Sequence[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    """The exit status and output of each of the ``runs``, which ends within a minute."""
    ended = []
    with ExitStack() as stack:
        for run in runs:
            stack.callback(run.kill)
        for run in runs:
            out, err = run.communicate(timeout=60)
            ended.append((run.returncode, out, err))
    return ended


def check(ended: Sequence[tuple[int, str, str]], addresses: Sequence[str]) -> None:
    """All ranks have met, and those of each host listen at its address of ``addresses`` alone."""
    for host, (status, out, err) in enumerate(ended):
        assert status == 0, err
        for rank in (2 * host, 2 * host + 1):
            assert lines_of(out, rank) == [f"10.0 {addresses[host]} cable"]


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


# How host 0 is called, what the hosts know of names, and the endpoint: what others were bitten by.
RESOLVERS = {
    "no DNS": ("first", ("", ""), "{0}"),
    "its own name is at 127.0.1.1": ("first", ("127.0.1.1 first", "{0} first"), "first"),
    "its own name is at ::1": ("first", ("::1 first", "{0} first"), "first"),
    "its name is one for the other direction": (
        "1.0.0.127.in-addr.arpa", ("127.0.0.1 1.0.0.127.in-addr.arpa", ""), "{0}",
    ),
    "its name is that of ip6.arpa": (
        "1.0.0.0.ip6.arpa", ("::1 1.0.0.0.ip6.arpa", "{0} 1.0.0.0.ip6.arpa"), "1.0.0.0.ip6.arpa",
    ),
    "its name is a number": ("12345", ("", ""), "{0}"),
    "its name is localhost": ("localhost", ("127.0.0.1 localhost\n::1 localhost", ""), "{0}"),
    "its name has both versions": ("first", ("{0} first\n{6} first",) * 2, "first"),
    "its name has one on each": ("first", ("{0} first", "{6} first\n{0} first"), "first"),
    "its name means others too": ("first", ("192.0.2.1 first\n{0} first",) * 2, "first"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("case", "numbered"), [(case, number % 2 == 0) for number, case in enumerate(RESOLVERS)]
)
def test_whatever_names_resolve_to(bench: Bench, case: str, numbered: bool) -> None:
    with hosts_of_a_network(2, (4, 6)) as hosts:
        name, known, endpoint = RESOLVERS[case]
        places = {"0": hosts.address(0), "6": hosts.address6(0)}
        for host in range(2):
            lines = known[host].replace("{0}", places["0"]).replace("{6}", places["6"])
            hosts.rename(host, name if host == 0 else "second", f"{lines}\n")
        endpoint = endpoint.replace("{0}", places["0"])
        options = ([], []) if not numbered else (["--node-rank", 0], ["--node-rank", 1])
        ended = run_on(bench, hosts, f"{endpoint}:29500", *options)
        for status, out, err in ended:
            assert status == 0, err
            assert out.count(" 10.0 ") == 2
            assert "127.0" not in out


@pytest.mark.parametrize("endpoint", ["localhost", "127.0.0.1", "[::1]"])
def test_loopback_is_refused_at_once_with_the_right_addresses(bench: Bench, endpoint: str) -> None:
    with hosts_of_a_network(2, (4, 6)) as hosts:
        for host, (status, _, err) in enumerate(run_on(bench, hosts, f"{endpoint}:29500")):
            assert f"don't reach {endpoint}:29500, which means this host itself" in err
            assert f"{hosts.address(host)} (cable)" in err
            assert (status, "Traceback" in err) == (2, False)


def test_host_with_an_address_hears_that_host_0_is_on_loopback(bench: Bench) -> None:
    with hosts_of_a_network(2, (4, 6)) as hosts:
        for address in (hosts.address(0), f"[{hosts.address6(0)}]"):
            asked = start(bench, hosts, 1, f"{address}:29500")
            # It is to ask before host 0 is there, which doesn't stay.
            assert until(lambda pid=asked.pid: "libtorch" in Path(f"/proc/{pid}/maps").read_text())
            ended = communicate([start(bench, hosts, 0, "localhost:29500"), asked])
            assert [(status, "Traceback" in err) for status, _, err in ended] == [(2, False)] * 2
            assert "don't reach localhost:29500, which means this host itself" in ended[0][2]
            told = f"Host 0 ({socket.gethostname()}) has given up: its --rdzv-endpoint is localhost"
            assert told in ended[1][2]


# How each host is called, its lines of /etc/hosts, and the endpoint, which means, on each, itself.
ITSELF = {
    "each knows the first one's name": (("first", "second"), "127.0.1.1 first\n", "first"),
    "each has one name, as copies have": (("same", "same"), "127.0.2.1 same\n", "same"),
    "an address for listening": (("first", "second"), "", "0.0.0.0"),
    "one of IPv6": (("first", "second"), "", "[::]"),
}


@pytest.mark.parametrize("numbered", [True, False])
@pytest.mark.parametrize("case", ITSELF)
def test_name_that_each_host_has_for_itself_is_told_early(
    bench: Bench, case: str, numbered: bool
) -> None:
    """Host 0 waits on, as others may know it by another address; who can't meet anybody ends."""
    names, known, endpoint = ITSELF[case]
    patient, given = ["--rdzv-timeout", 300], 2 * numbered
    with hosts_of_a_network(2) as hosts:
        for host, name in enumerate(names):
            hosts.rename(host, name, known)
        runs = [
            start(
                bench, hosts, host, f"{endpoint}:29500", [*patient, *["--node-rank", host][:given]]
            )
            for host in range(2)
        ]
        with ExitStack() as stack:
            for run in runs:
                stack.callback(run.communicate)
                stack.callback(run.kill)
            waits = [True, not numbered] if known else [numbered, False]
            for host, run in enumerate(runs):
                assert run.stderr is not None
                begun = time.monotonic()
                said = run.stderr.readline()
                assert time.monotonic() - begun < 100
                assert f"{hosts.address(host)} (cable)" in said
                if waits[host]:
                    assert said.startswith(f"lockstep: waiting at {endpoint}:29500 for the other")
                    assert run.poll() is None
                else:
                    assert f"{endpoint}:29500, which means this host itself" in said
                    assert run.wait(10) == 2


def test_host_0_may_listen_at_all_addresses(bench: Bench) -> None:
    for version, endpoint in ((4, "0.0.0.0"), (4, "[::]"), (6, "[::]")):
        with hosts_of_a_network(2, (version,)) as hosts:
            at = hosts.address if version == 4 else hosts.address6
            runs = [
                start(bench, hosts, host, f"{where}:29500")
                for host, where in enumerate((endpoint, f"[{at(0)}]" if version == 6 else at(0)))
            ]
            check(communicate(runs), [at(host) for host in range(2)])


def test_name_of_another_host_than_host_0_is_refused_at_once(bench: Bench) -> None:
    with hosts_of_a_network(1) as hosts:
        hosts.rename(0, "second", "127.0.1.1 second\n")
        options = ["--node-rank", 1]
        ((status, _, err),) = run_on(bench, hosts, "second:29500", options, environs=({},))
        assert "don't reach second:29500, which means this host itself" in err
        assert (status, "Traceback" in err) == (2, False)


@pytest.mark.parametrize("interface", ["nope", "cable,nope", "lo"])
def test_interface_that_does_not_fit_is_told(bench: Bench, interface: str) -> None:
    with hosts_of_a_network(2) as hosts:
        environs = ({"GLOO_SOCKET_IFNAME": interface}, {})
        ended = run_on(bench, hosts, f"{hosts.address(0)}:29500", environs=environs)
        said = "GLOO_SOCKET_IFNAME names 'nope', but host"
        if interface == "lo":
            said = f"host 0 ({socket.gethostname()}) has no address for others"
        for status, _, err in ended:
            assert status == 1
            assert said in err


@pytest.mark.parametrize("on_both", [True, False])
def test_interface_from_which_the_others_are_not_reached_is_told(
    bench: Bench, on_both: bool
) -> None:
    """By its name, with those that there are; where it isn't asked for, nothing is said."""
    with hosts_of_a_network(2) as hosts:
        for host in range(2):
            enter = [*hosts.on(host), "ip"]
            pair = ["link", "add", "apart", "type", "veth", "peer", "name", "end"]
            subprocess.run([*enter, *pair], check=True)
            address = f"192.168.{host}.1/24"
            subprocess.run([*enter, "addr", "add", address, "dev", "apart"], check=True)
            for end in ("apart", "end"):
                subprocess.run([*enter, "link", "set", end, "up"], check=True)
        asked = {"GLOO_SOCKET_IFNAME": "apart"}
        environs = (asked if on_both else {}, asked)
        ended = run_on(bench, hosts, f"{hosts.address(0)}:29500", environs=environs)
    name = socket.gethostname()
    for status, _, err in ended:
        assert status == 1
        assert f"host 0 ({name}) doesn't reach host 1 ({name}) at 192.168.1.1 (" in err
        assert f"Host 1 ({name}) has GLOO_SOCKET_IFNAME=apart, of lo (127.0.0.1), cable (" in err
        assert (f"Host 0 ({name}) has GLOO_SOCKET_IFNAME" in err) == on_both
        # It is reached, only not there.
        assert (f"host 1 ({name}) doesn't reach host 0 ({name})" in err) == on_both


def test_surplus_host_is_told_and_the_others_go_on(bench: Bench) -> None:
    with hosts_of_a_network(3) as hosts:
        text = f"{TOTAL}\n    import time; time.sleep(8)\n"
        environs = ({}, {}, {})
        options = ([], [], [])
        ended = run_on(
            bench, hosts, f"{hosts.address(0)}:29500", *options, environs=environs, text=text
        )
        assert sorted(status for status, _, _ in ended) == [0, 0, 2]
        (told,) = (err for status, _, err in ended if status == 2)
        assert "There are 2 hosts at 10.77.0.1:29500 without this one" in told
