"""The store at the endpoint where the launchers of several hosts meet.

Host 0 holds it open, the others connect to it. Names are resolved here alone: from then on, the
launchers and their ranks know the store by a numeric address.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import sys
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from lockstep.comm import answered
from lockstep.deadline import Deadline
from lockstep.errors import LaunchError
from lockstep.launcher.job import Meeting
from lockstep.memory_files import files_in_memory, name_of
from lockstep.world import (
    SILENCE_SECONDS,
    addresses,
    end_on_silence,
    first_line,
    first_reached,
    is_local,
    is_loopback,
    is_unspecified,
    reached,
    resolved,
)

_BACKLOG = 1024  # every rank may connect before the store accepts the first
_CONNECT_SECONDS = 5.0  # no signal is handled while the store connects
_KEEPER_SECONDS = 2.0  # the same, of the host that keeps it
_RETRY_SECONDS = 0.2
_STORE_TIMEOUT = timedelta(seconds=60)
# Launchers of one host that are to meet on loopback are started together, by a script.
_TOGETHER_SECONDS = 3.0
_LOOK_SECONDS = 0.5
_TELL_SECONDS = 2.0  # for hosts that come to another address than that on loopback
_NUM_TOLD_AT = 8  # addresses of this host at which they are told
_MOST_BYTES = 1 << 30  # of a store; ranks and launchers take some KiB each
_LOOPBACK_NAMES = ("localhost", "localhost.localdomain", "ip6-localhost", "ip6-loopback")


class Endpoint(NamedTuple):
    """The store, and the numeric address at which it is for the ranks of this host."""

    store: dist.TCPStore
    address: str
    is_held: bool  # whether this launcher holds it open
    first_bytes: int = 0  # what this launcher had of memory before, if it does

    def check(self) -> None:
        """Raise LaunchError if the store has taken very much of this launcher's memory.

        It takes what anybody writes to it, without a bound of its own.
        """
        if self.is_held and _memory_bytes() - self.first_bytes > _MOST_BYTES:
            raise LaunchError(
                f"The store of the run, at port {self.store.port} of this host, has taken more "
                f"than {_MOST_BYTES >> 20} MiB. If the program doesn't keep so much there, "
                "somebody else writes to it: keep the port in a network that you trust."
            )


def reach_endpoint(meeting: Meeting, deadline: Deadline, company: Company) -> Endpoint:
    """Hold the store open on host 0 or, of hosts without numbers, the one that can listen there.

    On the others, connect to it; it may not be there yet.

    Raises:
        LaunchError: If it can't be opened, or isn't there when the deadline ends.
    """
    if meeting.host in (0, None):
        try:
            return _open_store(_listener(meeting))
        except (OSError, RuntimeError) as error:
            # Without a number, it is another host's, or another launcher's of this one.
            if meeting.host == 0:
                reason = (isinstance(error, OSError) and error.strerror) or first_line(error)
                raise LaunchError(
                    f"Host 0 can't listen at the rendezvous endpoint {meeting.endpoint}: {reason}. "
                    "Give a name or an address of this host and a port that is free."
                    f"{local_addresses()}"
                ) from error
    return _connect(meeting, deadline, company)


def local_addresses(meeting: Meeting | None = None) -> str:
    """A sentence, for whom an address was mistyped; a second, on a name of ``meeting``."""
    listed = ", ".join(f"{address} ({name})" for address, name in addresses().items())
    told = f" The addresses of this host, {socket.gethostname()}, are {listed or 'none'}."
    if meeting is not None and _is_named_on_loopback(meeting):
        told += (
            f" It knows {meeting.address} as an address on loopback, which means itself; so should "
            "no other host than that of this name."
        )
    return told


def _listener(meeting: Meeting) -> socket.socket:
    """A socket that listens at the endpoint, as the other hosts reach it.

    Raises:
        OSError: If this host can't listen there.
        NoAnswer: If the name isn't resolved in time.
    """
    if is_unspecified(meeting.address):
        return _listener_everywhere(meeting.port)
    find = partial(resolved, meeting.address, meeting.port)
    found = answered(find, meeting.timeout_seconds)
    listeners, errors = {}, []
    for address, (family, where) in found.items():
        try:
            listeners[address] = socket.create_server(where, family=family, backlog=_BACKLOG)
        except OSError as error:
            errors.append(error)
    # Of a name that means several addresses here, or 127.0.1.1 as it may on the host of that name,
    # the others may know any address. Those of localhost are for this host.
    is_here = _is_this_host(meeting.address)
    if listeners and (is_here or (len(listeners) == 1 and not all(map(is_loopback, found)))):
        listener = next(iter(listeners.values()))
        for other in set(listeners.values()) - {listener}:
            other.close()
        return listener
    for other in listeners.values():
        other.close()
    if not listeners:
        # The others may know host 0 by an address that only a router has.
        if meeting.host is None or errors[0].errno != errno.EADDRNOTAVAIL:
            raise errors[0]
        with contextlib.suppress(OSError):
            there = reached(meeting.address, meeting.port, _KEEPER_SECONDS)
            raise LaunchError(
                f"There is a host 0 at {meeting.endpoint} already: somebody answers at {there}, "
                "which is no address of this host. Give each host another --node-rank."
                f"{local_addresses()}"
            )
    return _listener_everywhere(meeting.port)


def _listener_everywhere(port: int) -> socket.socket:
    try:
        return socket.create_server(
            ("", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True
        )
    except (OSError, ValueError) as error:  # ValueError: no IPv6
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise
        return socket.create_server(("", port), backlog=_BACKLOG)


def _is_this_host(address: str) -> bool:
    """Whether ``address`` is for every host that host itself."""
    if address.lower() in _LOOPBACK_NAMES or address.lower().endswith(".localhost"):
        return True
    with contextlib.suppress(ValueError):  # another name
        return is_loopback(address)
    return False


def _open_store(listener: socket.socket) -> Endpoint:
    """A store, which has threads, where ``listener`` listens; by itself it binds all interfaces.

    Raises:
        OSError: If this host can't reach itself there.
        RuntimeError: If the store can't be opened.
    """
    address, port, *_ = listener.getsockname()
    first_bytes = _memory_bytes()
    hosts = {"0.0.0.0": ["127.0.0.1"], "::": ["127.0.0.1", "::1"]}.get(address, [address])
    try:
        # The store's own attempts handle no signal, and warn of each that fails.
        address = first_reached(hosts, port, _KEEPER_SECONDS)
    except OSError as error:
        listener.close()
        raise ConnectionError(
            f"this host doesn't reach itself at {error} ('ip link set lo up' may help)"
        ) from error
    opened = partial(dist.TCPStore, address, port, is_master=True, timeout=_STORE_TIMEOUT)
    descriptor = listener.detach()
    opening = partial(opened, wait_for_workers=False, master_listen_fd=descriptor)
    return Endpoint(answered(opening, 2 * _CONNECT_SECONDS), address, True, first_bytes)


def _memory_bytes() -> int:
    """The memory that is this process's alone."""
    _, resident, shared, *_ = Path("/proc/self/statm").read_text().split()
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGESIZE")


def _connect(meeting: Meeting, deadline: Deadline, company: Company) -> Endpoint:
    timeout = timedelta(seconds=_CONNECT_SECONDS)

    def connect() -> Endpoint:
        # The store's own attempts warn of each that fails.
        there = reached(meeting.address, meeting.port, _CONNECT_SECONDS)
        client = partial(dist.TCPStore, there, meeting.port, is_master=False, timeout=timeout)
        return Endpoint(client(wait_for_workers=False), there, is_held=False)

    while True:
        try:
            # In another thread, so that signals are handled, also while a name is looked up.
            endpoint = answered(connect, min(3 * _CONNECT_SECONDS, deadline.left() + 1))
        except (OSError, RuntimeError) as error:
            company.check()
            if not deadline.left():
                raise LaunchError(
                    f"Nobody answered at the rendezvous endpoint {meeting.endpoint} as host 0 "
                    f"does within {meeting.timeout_seconds} seconds: {first_line(error)}. Is "
                    "'lockstep run' given on the first host too, is the name right, and does no "
                    f"firewall keep the port shut?{local_addresses()}"
                ) from error
            time.sleep(_RETRY_SECONDS)
        else:
            endpoint.store.set_timeout(_STORE_TIMEOUT)
            # Later than the agreement of the hosts notices it.
            limit = meeting.host_timeout_seconds + SILENCE_SECONDS
            end_on_silence(endpoint.address, meeting.port, limit)
            return endpoint


class NobodyComes(LaunchError):
    """No other host can come to an endpoint on loopback, and no other launcher of this one does."""


def tell_at_other_addresses(meeting: Meeting, endpoint: Endpoint) -> None:
    """Let hosts that were given another address of this one hear that nobody is there.

    For a moment, each such address has a store in which they read why there is no meeting. If this
    launcher listens at all addresses, it is its own.
    """
    why = (
        f"Host 0 ({socket.gethostname()}) has given up: its --rdzv-endpoint is {meeting.endpoint}, "
        "which means, on every host, that host itself. Give, on every host, the name or address "
        "by which they all reach host 0."
    )
    outside = [address for address in addresses() if not is_local(address)]
    stores = [endpoint.store]
    with contextlib.suppress(RuntimeError):
        dist.PrefixStore("lockstep", endpoint.store).set("given up", why)
    for address in outside[:_NUM_TOLD_AT]:
        with contextlib.suppress(OSError, RuntimeError):  # another program has the port
            ((family, where),) = resolved(address, meeting.port).values()
            listener = socket.create_server(where, family=family, backlog=_BACKLOG)
            stores.append(_open_store(listener).store)
            dist.PrefixStore("lockstep", stores[-1]).set("given up", why)
    time.sleep(_TELL_SECONDS)


class Company:
    """The other launchers on this host: nobody else can come to an endpoint on loopback."""

    def __init__(self, meeting: Meeting) -> None:
        self._meeting, self._next_look = meeting, Deadline(0)
        self._deadline = Deadline(_TOGETHER_SECONDS)
        self._is_settled = False  # there is or was one, or how others can come is told

    def check(self, is_held: bool = False) -> None:
        """Raise LaunchError if nobody else can come to the store, which this launcher may hold.

        Otherwise two hosts would each wait for the other until the timeout. If others can come, but
        not by the endpoint as this host knows it, say so once.
        """
        if self._is_settled or self._next_look.left():
            return
        self._next_look = Deadline(_LOOK_SECONDS)
        if not self._is_on_loopback():
            self._is_settled = is_held
            return
        self._is_settled = _is_another_here(self._meeting.mark)
        if self._deadline.left() or self._is_settled:
            return
        if is_held and self._is_everywhere():
            self._is_settled = True
            print(self._how_others_come(), file=sys.stderr, flush=True)
            return
        raise NobodyComes(
            f"Launchers of other hosts don't reach {self._meeting.endpoint}, which means this "
            "host itself, and no other 'lockstep run' on it is to meet there. Give as "
            "--rdzv-endpoint, on every host, the name or address by which they all reach host "
            f"0.{local_addresses()}"
        )

    def _is_on_loopback(self) -> bool:
        address = self._meeting.address
        return (
            _is_this_host(address)
            or is_unspecified(address)
            or _is_named_on_loopback(self._meeting)
        )

    def _is_everywhere(self) -> bool:
        """Whether the store is at all addresses of this host, as the one that all hosts go to.

        Without numbers, any host could listen at 0.0.0.0.
        """
        address = self._meeting.address
        is_host_0 = self._meeting.host == 0 or not is_unspecified(address)
        return is_host_0 and not _is_this_host(address)

    def _how_others_come(self) -> str:
        return (
            f"lockstep: waiting at {self._meeting.endpoint} for the other hosts, none of which has "
            f"come yet. Here {self._meeting.address} means this host itself, so it listens at all "
            "its addresses. If it means themselves on other hosts too, they don't come: then give "
            f"one of these addresses as --rdzv-endpoint, on every host.{local_addresses()}"
        )


def _is_named_on_loopback(meeting: Meeting) -> bool:
    """Whether this host knows the name by addresses on loopback alone."""
    with contextlib.suppress(OSError, RuntimeError):
        find = partial(resolved, meeting.address, 0)
        return all(map(is_loopback, answered(find, _CONNECT_SECONDS)))
    return False


def _is_another_here(mark: str) -> bool:
    """Whether another launcher in this host's network has a file with this ``mark``."""
    for pid, path in files_in_memory(mark):
        with contextlib.suppress(OSError):  # it has just ended
            is_by_it = name_of(path) == f"{mark}{pid}"
            networks = {os.readlink(f"/proc/{process}/ns/net") for process in (pid, "self")}
            if is_by_it and pid != os.getpid() and len(networks) == 1:
                return True
    return False
