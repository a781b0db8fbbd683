"""The addresses by which the hosts of a run reach each other.

Hosts tell each other their numeric addresses, and the first rank of each tries those of all others:
a host's name may mean 127.0.1.1 there or nothing at all, an interface may have IPv4 that isn't
routed beside IPv6 that is, and bridges of containers have the same address on all hosts.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from typing import Any, TypeAlias

import torch.distributed as dist

from lockstep.comm import this_network
from lockstep.errors import InitError, RendezvousFailed
from lockstep.world.environment import Placement
from lockstep.world.network import addresses, answering, is_ipv6, is_local, own_address_towards
from lockstep.world.rendezvous import roll_call

_TRY_SECONDS = 5.0  # a packet that is lost is sent again after 1 second, and after 3
_MOST_TOLD = 4

# Of a host, for each of its network interfaces: addresses with ports where it listens.
_Offers: TypeAlias = Sequence[Sequence[tuple[str, int]]]


class HostsOfRun:
    """What the ranks of a run tell each other of their hosts' addresses; every rank makes one.

    Attributes:
        is_one: Whether all ranks are in the network of one host.
    """

    def __init__(self, store: dist.Store, place: Placement, timeout: timedelta) -> None:
        self._store, self._place, self._timeout = store, place, timeout
        towards = None if place.master is None else own_address_towards(*place.master)
        notes = self._tell("networks", [this_network(), towards])
        networks = [network for network, _ in notes]
        self._leaders = [networks.index(network) for network in dict.fromkeys(networks)]
        self._leader = networks.index(this_network())
        self.is_one = len(self._leaders) == 1
        if towards is None or is_local(towards):
            # The host that all others go to may know itself only by such an address.
            others = [other for _, other in notes if other is not None and not is_local(other)]
            towards = own_address_towards(others[0], 9) if others else None
        self._towards_others = towards

    def _tell(self, subject: str, note: object) -> list[Any]:
        """Tell ``note``, and return those of all ranks."""
        store = dist.PrefixStore(f"hosts/{subject}", self._store)
        notes = roll_call(store, self._place, self._timeout, json.dumps(note))
        try:
            return [json.loads(note) for note in notes]
        except ValueError as error:
            raise RendezvousFailed(
                f"What the ranks tell each other of their {subject} can't be read: something else "
                "than they writes to their store."
            ) from error

    def agree(self, interfaces: Sequence[str]) -> list[str]:
        """An address of this host on each of ``interfaces`` or, if there are none, one on any.

        All other hosts have reached it, and those of all hosts are of one version of IP.

        Raises:
            InitError: If there is no such interface, or it has no address.
            RendezvousFailed: If hosts don't reach each other.
        """
        found = [self._on(name) for name in interfaces] or [self._on(None)]
        with ExitStack() as stack:
            is_leader = self._place.rank == self._leader
            listening = [list(_listen(each, stack)) for each in found] if is_leader else []
            notes = self._tell("addresses", [socket.gethostname(), listening])
            names = [notes[leader][0] for leader in self._leaders]
            offers: list[_Offers] = [notes[leader][1] for leader in self._leaders]
            if len(set(map(len, offers))) > 1:
                raise InitError(
                    "GLOO_SOCKET_IFNAME names more network interfaces on one host than on "
                    "another. Name as many on each, in the same order, or leave it out."
                )
            # Most times the first will do; others, which may not be routed, take seconds.
            for most in (1, None):
                tried = [[each[:most] for each in theirs] for theirs in offers]
                notes = self._tell(f"ways/{most}", _reached(tried) if is_leader else [])
                reached = [notes[leader] for leader in self._leaders]
                if chosen := _choice(offers, reached):
                    return chosen[self._leaders.index(self._leader)]
        raise RendezvousFailed(
            f"The hosts don't reach each other: {_missing(names, offers, reached)}. Each address "
            f"was tried for {_TRY_SECONDS:g} s, at a port that the kernel had chosen, as it does "
            "for Gloo's and NCCL's. See what a firewall between them does, and name the right "
            "network interface of each host by GLOO_SOCKET_IFNAME."
        )

    def _on(self, interface: str | None) -> list[str]:
        """This host's addresses for others, on this interface; that towards them comes first."""
        local = addresses()
        found = [address for address in local if interface in (None, local[address])]
        if interface is not None and not found:
            there = ", ".join(f"{name} ({address})" for address, name in local.items())
            raise InitError(
                f"GLOO_SOCKET_IFNAME names {interface!r}, but host {socket.gethostname()} has no "
                f"such network interface with an address. It has {there or 'none'}. Name one of "
                "them, or leave the variable out."
            )
        first = self._towards_others
        if first is not None and (interface is None or first in found):
            found.insert(0, first)
        return [address for address in dict.fromkeys(found) if not is_local(address)]


def _listen(found: Sequence[str], stack: ExitStack) -> Iterator[tuple[str, int]]:
    """Listen at these addresses until ``stack`` ends."""
    for address in found:
        family = socket.AF_INET6 if is_ipv6(address) else socket.AF_INET
        with suppress(OSError):  # of an interface that is down
            listener = socket.create_server((address, 0), family=family, backlog=1024)
            stack.enter_context(listener)
            yield address, listener.getsockname()[1]


def _reached(tried: Sequence[_Offers]) -> list[list[str]]:
    """Of each host, the addresses that this one reaches; what is its own belongs to no other."""
    local = addresses()
    places = [
        [(address, port) for each in theirs for address, port in each if address not in local]
        for theirs in tried
    ]
    found = answering([place for theirs in places for place in theirs], _TRY_SECONDS)
    return [[place[0] for place in theirs if not found[place]] for theirs in places]


def _choice(
    offers: Sequence[_Offers], reached: Sequence[Sequence[Sequence[str]]]
) -> list[list[str]] | None:
    """Addresses of each host that all others reach, of one version of IP; None if there are none.

    ``reached`` has, of each host, the addresses of each that it reaches.
    """
    hosts = range(len(offers))
    by_all = [
        set[str].intersection(*(set(reached[other][host]) for other in hosts if other != host))
        for host in hosts
    ]
    firsts = [is_ipv6(each[0][0]) for each in offers[0] if each]
    for is_6 in dict.fromkeys([*firsts, True, False]):
        chosen = [
            [
                next((a for a, _ in each if a in by_all[host] and is_ipv6(a) == is_6), "")
                for each in offers[host]
            ]
            for host in hosts
        ]
        if all(map(all, chosen)):
            return chosen
    return None


def _missing(
    names: Sequence[str], offers: Sequence[_Offers], reached: Sequence[Sequence[Sequence[str]]]
) -> str:
    """Who doesn't reach whom, and where."""
    told = []
    for host, name in enumerate(names):
        offered = [address for each in offers[host] for address, _ in each]
        if not offered:
            told.append(f"host {host} ({name}) has no address for others")
        for other, theirs in enumerate(reached):
            if other != host and (lost := [a for a in offered if a not in theirs[host]]):
                told.append(
                    f"host {other} ({names[other]}) doesn't reach host {host} ({name}) at "
                    + " or ".join(lost)
                )
    more = f", and {len(told) - _MOST_TOLD} more" if len(told) > _MOST_TOLD else ""
    return "; ".join(told[:_MOST_TOLD]) + more
