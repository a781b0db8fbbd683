"""This host in its network: interfaces, addresses, and connections to stores."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

_SIOCGIFADDR = 0x8915  # Linux's request for an interface's IPv4 address
# Longer than networks are out of order that come back, and TCP waits a quarter of an hour.
_SILENCE_SECONDS = 60


def addresses() -> dict[str, str]:
    """The addresses of this host, each with the name of its network interface."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                request = struct.pack("256s", name.encode())
                answer = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, request)
                found[socket.inet_ntoa(answer[20:24])] = name
    with contextlib.suppress(OSError):  # a kernel without IPv6
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, *_, name = line.split()
            found[socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))] = name
    return found


def interface_towards(host: str) -> str | None:
    """The network interface from which this host reaches ``host``, or None if that is unknown.

    Gloo would listen at the address of this host's own name, which on many a machine is
    127.0.0.1, where no other host can reach it. Shown by test_two_hosts_of_a_network.
    """
    with contextlib.suppress(OSError):
        for family, kind, _, _, where in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            # Connecting a datagram socket finds a route, and sends nothing.
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(where)
                return addresses().get(probe.getsockname()[0].partition("%")[0])
    return None


def end_on_silence(port: int) -> None:
    """Have this process's requests to stores at ``port`` fail after a minute without a sign.

    Otherwise, if the network is cut, they wait for as long as TCP tries.
    """
    for connection in _connections():
        if connection.getpeername()[1] == port:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, number in (
                (socket.TCP_KEEPIDLE, _SILENCE_SECONDS // 4),
                (socket.TCP_KEEPINTVL, _SILENCE_SECONDS // 4),
                (socket.TCP_USER_TIMEOUT, _SILENCE_SECONDS * 1000),
            ):
                connection.setsockopt(socket.IPPROTO_TCP, option, number)


def own_end(port: int) -> str:
    """The address from which this process is connected to ``port``; "" if it isn't."""
    ends = (_name(c.getsockname()) for c in _connections() if c.getpeername()[1] == port)
    return next(ends, "")


def connection_from(end: str, port: int) -> socket.socket | None:
    """A duplicate of the connection at ``port`` of this process whose other end is ``end``.

    None if there is none, as where something between the two hosts translates addresses.
    """
    for connection in _connections():
        ends = connection.getsockname()[1], _name(connection.getpeername())
        if ends == (port, end):
            return connection.dup()
    return None


def has_ended(connection: socket.socket) -> bool:
    """Whether the other side has closed the connection, or its process has ended."""
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    return bool(poll.poll(0))


def _name(address: tuple[str, int]) -> str:
    host, port, *_ = address
    # A socket of IPv6 may speak IPv4. After % is this host's own name of an interface.
    return f"{host.removeprefix('::ffff:').partition('%')[0]} {port}"


def _connections() -> Iterator[socket.socket]:
    """This process's connections over TCP, one after the other, each as long as it is looked at."""
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # it has just been closed, or listens
            if not os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(descriptor))) as connection:
                inet = connection.family in (socket.AF_INET, socket.AF_INET6)
                if inet and connection.type == socket.SOCK_STREAM and connection.getpeername():
                    yield connection
