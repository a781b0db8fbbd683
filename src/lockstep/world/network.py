"""This host in its network: interfaces, addresses, and connections to stores."""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import ipaddress
import logging
import os
import select
import selectors
import socket
import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from lockstep.deadline import Deadline
from lockstep.errors import BackendUnavailable

_SIOCGIFCONF = 0x8912  # Linux's request for all IPv4 addresses
_IFREQ_BYTES = 40  # of each in its answer, on machines of 64 bits


def addresses() -> dict[str, str]:
    """The addresses of this host, each with the name of its network interface."""
    found = {}
    room = array.array("B", bytes(1024 * _IFREQ_BYTES))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        request = struct.pack("iL", len(room), room.buffer_info()[0])
        with contextlib.suppress(OSError):  # a kernel without IPv4
            num_bytes, _ = struct.unpack("iL", fcntl.ioctl(asking, _SIOCGIFCONF, request))
            for start in range(0, num_bytes, _IFREQ_BYTES):
                entry = bytes(room[start : start + _IFREQ_BYTES])
                name = entry[:16].partition(b"\0")[0].decode(errors="replace")
                # A second address may have a label, such as eth0:1.
                found[socket.inet_ntoa(entry[20:24])] = name.partition(":")[0]
    with contextlib.suppress(OSError):  # a kernel without IPv6
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, *_, name = line.split()
            found[socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))] = name
    return found


def is_ipv6(address: str) -> bool:
    """Whether a numeric ``address`` is one of IPv6."""
    return ":" in address


def is_loopback(address: str) -> bool:
    """Whether a numeric ``address`` means, on every host, that host itself."""
    return ipaddress.ip_address(address).is_loopback


def is_unspecified(address: str) -> bool:
    """Whether ``address`` is 0.0.0.0 or ::, where one listens for all of a host's own addresses."""
    with contextlib.suppress(ValueError):  # a name
        return ipaddress.ip_address(address).is_unspecified
    return False


def is_local(address: str) -> bool:
    """Whether other hosts can't go to a numeric ``address``, or need to be told an interface."""
    return is_loopback(address) or (
        is_ipv6(address) and ipaddress.ip_address(address).is_link_local
    )


def resolved(host: str, port: int) -> dict[str, tuple[socket.AddressFamily, Any]]:
    """The numeric addresses of ``host``, each with its family and what sockets take for it.

    Raises:
        OSError: If the name isn't known.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise OSError(errno.EINVAL, f"{host!r} can't be the name of a host ({error})") from error
    return {
        socket.getnameinfo(where, socket.NI_NUMERICHOST | socket.NI_NUMERICSERV)[0]: (family, where)
        for family, *_, where in found
    }


def address_towards(host: str, port: int) -> str | None:
    """The numeric address from which this host reaches ``host``, or None if that is unknown."""
    with contextlib.suppress(OSError):
        for family, where in resolved(host, port).values():
            # Connecting a datagram socket finds a route, and sends nothing.
            with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(where)
                return str(probe.getsockname()[0]).partition("%")[0]
    return None


def answering(
    places: Collection[tuple[str, int]], seconds: float, enough: int | None = None
) -> dict[tuple[str, int], str]:
    """Of each of ``places``, numeric addresses and ports, why no connection can be made, or "".

    All are tried at once, for so many seconds at most, or until ``enough`` have answered.
    """
    found = dict.fromkeys(places, f"no answer within {seconds:g} s")
    deadline = Deadline(seconds)
    with ExitStack() as stack, selectors.DefaultSelector() as selector:
        for place in places:
            ((family, where),) = resolved(*place).values()
            connection = stack.enter_context(socket.socket(family))
            connection.setblocking(False)
            number = connection.connect_ex(where)
            if number == errno.EINPROGRESS:
                selector.register(connection, selectors.EVENT_WRITE, place)
            else:
                found[place] = os.strerror(number) if number else ""
        while selector.get_map() and (left := deadline.left()):
            for key, _ in selector.select(left):
                assert isinstance(key.fileobj, socket.socket)
                number = key.fileobj.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                found[key.data] = os.strerror(number) if number else ""
                selector.unregister(key.fileobj)
            if enough is not None and list(found.values()).count("") >= enough:
                break
    return found


def reached(host: str, port: int, seconds: float) -> str:
    """The numeric address of ``host`` at which somebody listens: see :func:`first_reached`."""
    return first_reached(list(resolved(host, port)), port, seconds)


def first_reached(found: Sequence[str], port: int, seconds: float) -> str:
    """The first of some numeric addresses, and maybe of several hosts, at which somebody listens.

    Raises:
        OSError: If there is none, telling what was tried.
    """
    tried = answering([(address, port) for address in found], seconds, enough=1)
    there = [address for (address, _), trouble in tried.items() if not trouble]
    if not there:
        told = (f"{address}: {trouble}" for (address, _), trouble in tried.items())
        raise ConnectionError("; ".join(told))
    return there[0]


def local_end(port: int) -> str:
    """The address from which this process is connected to ``port``; "" if it isn't."""
    ends = (_name(connection.getsockname()) for _, connection in connections(port))
    return next(ends, "")


def connection_from(end: str, port: int) -> socket.socket | None:
    """A duplicate of the connection at ``port`` of this process whose other end is ``end``.

    None if there is none, as where something between the two hosts translates addresses.
    """
    for _, connection in _connections():
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


def connections(port: int) -> Iterator[tuple[int, socket.socket]]:
    """This process's connections to ``port`` of any host: see :func:`_connections`."""
    for number, connection in _connections():
        if connection.getpeername()[1] == port:
            yield number, connection


def _connections() -> Iterator[tuple[int, socket.socket]]:
    """The descriptors of this process's connections over TCP, each with a duplicate for a while."""
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # it has just been closed, or listens
            if not os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(descriptor))) as connection:
                inet = connection.family in (socket.AF_INET, socket.AF_INET6)
                if inet and connection.type == socket.SOCK_STREAM and connection.getpeername():
                    yield int(descriptor), connection


_INTERFACES, _FAMILY = "NCCL_SOCKET_IFNAME", "NCCL_SOCKET_FAMILY"
_log = logging.getLogger("lockstep")


def check_nccl_interfaces(environ: Mapping[str, str], local: Mapping[str, str]) -> list[str]:
    """Return the interfaces that NCCL_SOCKET_IFNAME leaves to NCCL; none if it isn't set.

    It has beginnings of names, with commas between them. With ``=`` before the first one they are
    whole names, and with ``^``, before that, those are meant that are not to be used.

    Args:
        environ: The variables.
        local: The addresses of this host, each with the name of its interface.

    Raises:
        BackendUnavailable: If it leaves none.

    Source: "Environment Variables" in NCCL's documentation.
    """
    given = environ.get(_INTERFACES, "")
    if len(given) < 2:  # NCCL doesn't look at it
        return []
    is_left_out = given.startswith("^")
    listed = given.removeprefix("^")
    is_whole = listed.startswith("=")
    # What follows a colon is a port, of other variables that are written like this one.
    words = [word.partition(":")[0] for word in listed.removeprefix("=").split(",") if word]

    def is_used(name: str) -> bool:
        is_listed = name in words if is_whole else name.startswith(tuple(words))
        return is_listed != is_left_out

    family = {"AF_INET": False, "AF_INET6": True}.get(environ.get(_FAMILY, ""))
    usable = {
        address: name
        for address, name in local.items()
        if family in (None, is_ipv6(address)) and not (is_ipv6(address) and is_loopback(address))
    }
    found = [name for name in dict.fromkeys(usable.values()) if is_used(name)]
    if not found:
        there = ", ".join(f"{name} ({address})" for address, name in usable.items())
        kind = "" if family is None else f" of {_FAMILY}={environ[_FAMILY]}"
        raise BackendUnavailable(
            f"{_INTERFACES}={given} leaves NCCL no network interface of host "
            f"{socket.gethostname()} with an address{kind}. It has {there or 'none'}. Let the "
            "variable name one of them or how it begins, or leave it out."
        )
    _log.info("%s=%s: NCCL listens on %s", _INTERFACES, given, " or ".join(found))
    return found
