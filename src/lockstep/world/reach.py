"""The addresses by which the hosts of a run reach each other.

Hosts tell each other their numeric addresses, and the first rank of each tries those of all others:
a host's name may mean 127.0.1.1 there or nothing at all, an interface may have IPv4 that isn't
routed beside IPv6 that is, and bridges of containers have the same address on all hosts.
"""

from __future__ import annotations

import ipaddress
import json
import socket
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from functools import partial
from typing import Any, TypeAlias, TypeVar

import torch.distributed as dist

from lockstep.comm import first_here, tell_apart, this_kernel, this_network, within_reach
from lockstep.entries import value_in
from lockstep.errors import InitError, RendezvousFailed
from lockstep.printable import printable
from lockstep.world.environment import Placement
from lockstep.world.network import address_towards, addresses, answering, is_ipv6, is_local
from lockstep.world.rendezvous import roll_call

_TRY_SECONDS = 5.0  # a packet that is lost is sent again after 1 second, and after 3
_MOST_TOLD, _MOST_TOLD_HERE = 4, 16
_MOST_ADDRESSES = 256  # of a host; each takes a descriptor for a while
_SAME = "its own address too"

_Note = TypeVar("_Note")
# Of a host, for each of its network interfaces: addresses with ports where it listens.
_Offers: TypeAlias = Sequence[Sequence[tuple[str, int]]]


def hosts_of_ranks(store: dist.Store, place: Placement, timeout: timedelta) -> Sequence[str]:
    """Return the name of each rank's host; every rank calls it.

    A host, or a container, is a network of a kernel. Several may have the same name, and virtual
    machines that go on from one image of a memory all else too, so ranks that seem to be on one
    host see whether they reach each other without leaving it.

    Raises:
        RendezvousFailed: Naming the ranks that have not come within ``timeout``.
    """
    with within_reach() as name:
        note = f"{name} {socket.gethostname()} {this_kernel('net')}"
        notes = roll_call(dist.PrefixStore("host", store), place, timeout, note)
        names, _, hosts = zip(*(note.partition(" ") for note in notes), strict=True)
        first = hosts.index(hosts[place.rank])
        if not place.on_one_host:
            first = first_here(names, hosts, place.rank)
        found = names[first] or hosts[first]
        # A name is of use as long as its rank is here: until all have seen whom they reach.
        tell_apart(found)
        return roll_call(dist.PrefixStore("its host", store), place, timeout, found)


class HostsOfRun:
    """What the ranks of a run tell each other of their hosts' addresses; every rank makes one.

    Attributes:
        is_one: Whether all ranks are in the network of one host.
    """

    def __init__(self, store: dist.Store, place: Placement, timeout: timedelta) -> None:
        self._store, self._place, self._timeout = store, place, timeout
        towards = None if place.master is None else address_towards(*place.master)
        notes = self._tell("networks", [this_network(), towards], _read_network)
        networks = [network for network, _ in notes]
        self._leaders = [networks.index(network) for network in dict.fromkeys(networks)]
        self._leader = networks.index(this_network())
        self.is_one = len(self._leaders) == 1
        if towards is None or is_local(towards):
            # The host that all others go to may know itself only by such an address.
            others = [other for _, other in notes if other is not None and not is_local(other)]
            towards = address_towards(others[0], 9) if others else None
        self._towards_others = towards

    def _tell(self, subject: str, note: object, read: Callable[[Any], _Note]) -> list[_Note]:
        """Tell ``note``, and return those of all ranks, as ``read`` returns them."""
        store = dist.PrefixStore(f"hosts/{subject}", self._store)
        notes = roll_call(store, self._place, self._timeout, json.dumps(note))
        try:
            return [read(value_in(note)) for note in notes]
        except (ValueError, TypeError, AttributeError, OverflowError) as error:
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
        seconds = min(_TRY_SECONDS, self._timeout.total_seconds() / 4)  # others wait meanwhile
        with ExitStack() as stack:
            is_leader = self._place.rank == self._leader
            listeners = [list(_listen(each, stack)) for each in found] if is_leader else []
            listening = [[each.getsockname()[:2] for each in those] for those in listeners]
            asked = f"GLOO_SOCKET_IFNAME={','.join(interfaces)}, of {_there()}" * bool(interfaces)
            offer = socket.gethostname(), listening, [*addresses()], asked
            notes = self._tell("addresses", offer, _read_offer)
            names = [notes[leader][0] for leader in self._leaders]
            offers: list[_Offers] = [notes[leader][1] for leader in self._leaders]
            if len(set(map(len, offers))) > 1:
                raise InitError(
                    "GLOO_SOCKET_IFNAME names more network interfaces on one host than on "
                    "another. Name as many on each, in the same order, or leave it out."
                )
            # Most times the first will do; others, which may not be routed, take seconds.
            is_more = any(len(each) > 1 for theirs in offers for each in theirs)
            for most in (1, None) if is_more else (1,):
                first = [[each[:most] for each in theirs] for theirs in offers]
                tried = _tried(first, seconds) if is_leader else [{} for _ in offers]
                told = self._tell(f"ways/{most}", tried, partial(_read_ways, len(offers)))
                ways = [told[leader] for leader in self._leaders]
                if chosen := _choice(offers, ways):
                    return chosen[self._leaders.index(self._leader)]
            known = {address for note in notes for address in note[2]}
            sources = self._tell("sources", _sources(listeners), _read_texts)
            came = {each for told in sources for each in told}
        limits = [
            f" Host {host} ({names[host]}) has {notes[leader][3]}."
            for host, leader in enumerate(self._leaders)
            if notes[leader][3]
        ]
        raise RendezvousFailed(
            f"The hosts don't reach each other: {_missing(names, offers, ways)}.{''.join(limits)} "
            "Gloo and NCCL connect them both ways, at their own addresses and ports that the "
            f"kernel chooses. {_advice(came - known)}"
        )

    def _on(self, interface: str | None) -> list[str]:
        """This host's addresses for others, on this interface; that towards them comes first."""
        local = addresses()
        found = [address for address in local if interface in (None, local[address])]
        if interface is not None and not found:
            raise InitError(
                f"GLOO_SOCKET_IFNAME names {interface!r}, but host {socket.gethostname()} has no "
                f"such network interface with an address. It has {_there()}. Name one of them, or "
                "leave the variable out."
            )
        first = self._towards_others
        if first is not None and (interface is None or first in found):
            found.insert(0, first)
        return [address for address in dict.fromkeys(found) if not is_local(address)]


def _there() -> str:
    """The network interfaces of this host, with their addresses."""
    found = [f"{name} ({address})" for address, name in addresses().items()]
    more = [f"and {len(found) - _MOST_TOLD_HERE} more"] if len(found) > _MOST_TOLD_HERE else []
    return ", ".join(found[:_MOST_TOLD_HERE] + more) or "none"


def _read_texts(note: Any) -> list[str]:
    return [printable(str(each)) for each in note]


def _read_network(note: Any) -> tuple[str, str | None]:
    network, towards = note
    return str(network), None if towards is None else _numeric(towards)


def _read_offer(note: Any) -> tuple[str, _Offers, list[str], str]:
    name, listening, known, asked = note
    offers = [[(_numeric(address), int(port) % 65536) for address, port in e] for e in listening]
    if sum(map(len, offers)) > _MOST_ADDRESSES:
        raise ValueError("no host has so many addresses")
    return printable(str(name)), offers, _read_texts(known), printable(str(asked))


def _read_ways(num_hosts: int, note: Any) -> list[dict[str, str]]:
    if len(note) != num_hosts:
        raise ValueError("there are other numbers of hosts")
    return [{str(name): printable(str(why)) for name, why in each.items()} for each in note]


def _numeric(address: Any) -> str:
    """Return an address; raise ValueError if it is a name, which would be looked up."""
    return str(ipaddress.ip_address(str(address).partition("%")[0]))


def _listen(found: Sequence[str], stack: ExitStack) -> Iterator[socket.socket]:
    """Listen at these addresses until ``stack`` ends."""
    for address in found:
        family = socket.AF_INET6 if is_ipv6(address) else socket.AF_INET
        with suppress(OSError):  # of an interface that is down
            listener = socket.create_server((address, 0), family=family, backlog=1024)
            yield stack.enter_context(listener)


def _sources(listeners: Sequence[Sequence[socket.socket]]) -> list[str]:
    """The addresses from which others have connected."""
    found = []
    for listener in (each for those in listeners for each in those):
        listener.setblocking(False)
        with suppress(OSError):  # there are no more
            while True:
                connection, (source, *_) = listener.accept()
                connection.close()
                found.append(source)
    return found


def _tried(offers: Sequence[_Offers], seconds: float) -> list[dict[str, str]]:
    """Of each host, why this one doesn't reach an address, or "" if it does.

    What is this host's own belongs to no other.
    """
    local = addresses()
    places = [
        [(address, port) for each in theirs for address, port in each if address not in local]
        for theirs in offers
    ]
    found = answering([place for theirs in places for place in theirs], seconds)
    return [{place[0]: found[place] for place in theirs} for theirs in places]


def _choice(
    offers: Sequence[_Offers], ways: Sequence[Sequence[Mapping[str, str]]]
) -> list[list[str]] | None:
    """Addresses of each host that all others reach, of one version of IP; None if there are none.

    ``ways`` has what each host has tried of each: see :func:`_tried`.
    """
    hosts = range(len(offers))
    reached = [[{a for a in each if not each[a]} for each in theirs] for theirs in ways]
    by_all = [
        set[str].intersection(*(reached[other][host] for other in hosts if other != host))
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
    names: Sequence[str], offers: Sequence[_Offers], ways: Sequence[Sequence[Mapping[str, str]]]
) -> str:
    """Who doesn't reach whom, where and why."""
    told, in_part = [], list[str]()
    for host, name in enumerate(names):
        offered = [address for each in offers[host] for address, _ in each]
        if not offered:
            told.append(f"host {host} ({name}) has no address for others")
        for other, theirs in enumerate(ways):
            of_host = theirs[host]
            if other != host and (lost := [a for a in offered if of_host.get(a, _SAME)]):
                (told if len(lost) == len(offered) else in_part).append(
                    f"host {other} ({names[other]}) doesn't reach host {host} ({name}) at "
                    + " or ".join(f"{a} ({of_host.get(a, _SAME)})" for a in lost)
                )
    told = told or in_part  # what hosts reach at another address may not be why
    more = f", and {len(told) - _MOST_TOLD} more" if len(told) > _MOST_TOLD else ""
    return "; ".join(told[:_MOST_TOLD]) + more


def _advice(strangers: Collection[str]) -> str:
    """What to do, where connections have come from the addresses of ``strangers``."""
    if not strangers:
        return (
            "See what a firewall between them does, and name the right network interface of each "
            "host by GLOO_SOCKET_IFNAME."
        )
    return (
        f"Connections came from {' and '.join(sorted(strangers))}, which is no host's address: a "
        "NAT between the hosts translates theirs. By GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, "
        "name network interfaces of each host, such as those of a VPN, that lead to the others "
        "without one; or have containers use their hosts' network."
    )
