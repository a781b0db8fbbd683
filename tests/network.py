"""Hosts of a network, as far as programs can tell: network namespaces that a switch joins.

They need root and the command ``ip``; tests that use them are skipped, by name, where they can't be
made. What else hosts don't share, such as files and memory, these do.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

FILES = Path("/etc/netns")  # what 'ip netns exec' shows in place of the files in /etc
_numbers = itertools.count()


class Hosts:
    """Some hosts, numbered from 0, with one cable each to a switch."""

    def __init__(self, names: list[str], switch: str) -> None:
        self._names, self.switch = names, switch
        self._hostnames: dict[int, str] = {}

    def rename(self, host: int, hostname: str, known: str) -> None:
        """Call ``host`` so, and let it know these lines of /etc/hosts and no server of names."""
        directory = FILES / self._names[host]
        directory.mkdir(parents=True)
        (directory / "hosts").write_text(known)
        (directory / "resolv.conf").write_text("")
        self._hostnames[host] = hostname

    def add_address(self, host: int, address: str) -> None:
        """Give the cable of ``host`` another address, such as 10.0.0.1/24."""
        _ip("-n", self._names[host], "addr", "add", address, "dev", "cable")

    def on(self, host: int) -> list[str]:
        """What to write before a command to run it on ``host``."""
        enter = ["ip", "netns", "exec", self._names[host]]
        if host not in self._hostnames:
            return enter
        rename = 'hostname "$0" && exec "$@"'
        return [*enter, "unshare", "--uts", "sh", "-c", rename, self._hostnames[host]]

    def start(
        self, host: int, command: Sequence[str], *, may_fork: bool = True, **options: Any
    ) -> subprocess.Popen[str]:
        """Start ``command`` on ``host``, with options of ``subprocess.Popen``.

        On a host under the test's own name an interpreter may be forked. See tests/interpreters.py.
        Not when another process has just been killed, whose children this one would adopt.
        """
        if host in self._hostnames or not may_fork:
            return subprocess.Popen([*self.on(host), *command], text=True, **options)
        path, new_network = f"/run/netns/{self._names[host]}", 0x40000000  # from <sched.h>

        def enter() -> None:  # which is pickled by value: not all that fork know this module
            libc = ctypes.CDLL(None, use_errno=True)
            with open(path) as namespace:
                if libc.setns(namespace.fileno(), new_network):
                    raise OSError(ctypes.get_errno(), f"can't enter the network at {path}")

        return subprocess.Popen(command, preexec_fn=enter, text=True, **options)

    @staticmethod
    def address(host: int) -> str:
        """The IPv4 address of ``host``."""
        return f"10.77.0.{host + 1}"

    @staticmethod
    def address6(host: int) -> str:
        """The IPv6 address of ``host``."""
        return f"fd88::{host + 1}"

    @contextmanager
    def translated(self, host: int, inside: str) -> Iterator[None]:
        """Put ``host`` behind a NAT: it has the address ``inside``, and others see another."""
        with self.slow_cable(host, 0.0, inside=inside):
            yield

    @contextmanager
    def slow_cable(
        self, host: int, delay_seconds: float, loss: float = 0.0, inside: str | None = None
    ) -> Iterator[subprocess.Popen[str]]:
        """Have each packet from and to ``host`` take so long, or be lost with this probability.

        By SIGUSR1, the process that is returned stalls: it passes on none any more.
        """
        name, port = self._names[host], f"port{host}"
        words = [name, self.switch, port, str(delay_seconds), str(loss)]
        if inside is not None:
            words += [inside, self.address(host)]
        command = [sys.executable, "-m", "tests.slow_cable", *words]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as cable:
            try:
                assert cable.stdout is not None
                if cable.stdout.readline() != "ready\n":
                    pytest.skip("there are no devices of the kind TAP here")
                _ip("-n", self.switch, "link", "set", port, "master", "bridge", "up")
                address = inside or self.address(host)
                _ip("-n", name, "addr", "add", f"{address}/24", "dev", "cable")
                _ip("-n", name, "link", "set", "cable", "up")
                if inside is not None:
                    _ip("-n", name, "route", "add", "10.77.0.0/24", "dev", "cable", "src", address)
                yield cable
            finally:
                cable.kill()

    def cut(self, host: int) -> None:
        """Pull the cable of ``host`` out of the switch: nothing arrives, and nothing is told."""
        _ip("-n", self.switch, "link", "set", f"port{host}", "down")


@contextmanager
def hosts_of_a_network(number: int, versions: tuple[int, ...] = (4,)) -> Iterator[Hosts]:
    """``number`` hosts with addresses of these ``versions`` of IP; skips the test if it can't."""
    if os.getuid() or shutil.which("ip") is None:
        pytest.skip("network namespaces need root, and the command 'ip'")
    of_these = f"lockstep-{os.getpid()}-{next(_numbers)}"
    switch, names = f"{of_these}-switch", [f"{of_these}-{host}" for host in range(number)]
    hosts = Hosts(names, switch)
    try:
        for name in (switch, *names):
            _ip("netns", "add", name)
        _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge", "up")
        for host, name in enumerate(names):
            port, cable = f"port{host}", ["cable", "netns", name]
            _ip("-n", switch, "link", "add", port, "type", "veth", "peer", "name", *cable)
            _ip("-n", switch, "link", "set", port, "master", "bridge", "up")
            if 4 in versions:
                _ip("-n", name, "addr", "add", f"{hosts.address(host)}/24", "dev", "cable")
            if 6 in versions:
                # nodad: the address is there at once, without a look at whether others have it.
                _ip(
                    "-n", name, "addr", "add", f"{hosts.address6(host)}/64", "dev", "cable", "nodad"
                )
            for interface in ("lo", "cable"):
                _ip("-n", name, "link", "set", interface, "up")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces can't be made here: {error.stderr.decode().strip()}")
    else:
        yield hosts
    finally:
        for name in (switch, *names):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
            shutil.rmtree(FILES / name, ignore_errors=True)


def start_on(
    hosts: Hosts, script: Path, *options: str, address: str = Hosts.address(0)
) -> list[subprocess.Popen[str]]:
    """Start two ranks of ``script`` on each of two ``hosts``."""
    endpoint = f"{address}:29500"
    return [
        hosts.start(
            number,
            [sys.executable, "-m", "lockstep", "run", "--nnodes", "2", "-n", "2",
             "--node-rank", str(number), "--rdzv-endpoint", endpoint, *options, str(script)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for number in range(2)
    ]  # fmt: skip


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
