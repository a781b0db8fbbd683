"""The network of this host: what tells it from others, and where Gloo listens in it."""

from __future__ import annotations

import errno
import functools
import os
import secrets
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lockstep.comm.failures import STORE_SECONDS, answered
from lockstep.entries import text_in
from lockstep.errors import RendezvousFailed

# One for each network interface that Gloo is to use; empty for Gloo's own choice.
_addresses: list[str] = []
# What tells this host from copies of it, once init() has seen to that.
_told_apart: list[str] = []


def this_kernel(namespace: str) -> str:
    """The kernel of this host, and this process's namespace of a kind, as no others are called.

    Not so the host's name: machines that were cloned have the same, and so may containers.

    Source: ``random(4)``, ``namespaces(7)``.
    """
    kernel, number = socket.gethostname(), 0
    with suppress(OSError):  # a sandbox that shows none of it
        kernel = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        number = os.stat(f"/proc/self/ns/{namespace}").st_ino
    return f"{kernel} {number}"


def this_network() -> str:
    """The network of this host, or of this container, as no other is called."""
    return " ".join([this_kernel("net"), *_told_apart])


def tell_apart(name: str) -> None:
    """Give the network of this host another name: virtual machines may be copies of one.

    Those that go on from one image of a memory have the kernel's name of that, and all else that
    can be read.
    """
    _told_apart[:] = [name]


def is_told_apart() -> bool:
    """Whether :func:`tell_apart` was called."""
    return bool(_told_apart)


@contextmanager
def within_reach() -> Iterator[str]:
    """Give a name by which processes in this network find each other, while the block runs.

    It is "" in a sandbox that forbids such sockets.
    """
    name = secrets.token_hex(16)
    with ExitStack() as stack:
        try:
            here = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
            here.bind(f"\0lockstep-host-{name}")
        except OSError:
            name = ""
        yield name


def first_here(names: Sequence[str], hosts: Sequence[str], rank: int) -> int:
    """The first rank on the host of this one.

    Args:
        names: That of each rank, as :func:`within_reach` gives it.
        hosts: What can be read of each rank's host, which is the same on copies of it.
        rank: The number of this rank.
    """
    alike = (other for other, host in enumerate(hosts) if host == hosts[rank])
    return next(other for other in alike if other == rank or is_within_reach(names[other]))


def is_within_reach(name: str) -> bool:
    """Whether the process that has this name is in this network, as far as that can be known.

    Sandboxes may forbid to make such sockets, or to connect to those of others.
    """
    if not name:
        return True
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as here:
            here.connect(f"\0lockstep-host-{name}")
    except OSError as error:
        return error.errno != errno.ECONNREFUSED
    return True


def this_memory() -> str:
    """What ranks have in common that can share memory: the network, and the kernel's user.

    Sockets, whose names are the network's, hand on the files, so namespaces of processes or of
    folders don't matter. In a namespace of users, as in containers without root, user 0 is another
    one than outside, or a few are the same: the kernel's map tells.

    Source: ``user_namespaces(7)``.
    """
    user = os.geteuid()
    with suppress(OSError):
        for line in Path("/proc/self/uid_map").read_text().splitlines():
            first, outside, number = map(int, line.split())
            if first <= os.geteuid() < first + number:
                user = outside + os.geteuid() - first
    return f"{this_network()} {user}"


def bind_gloo(addresses: Sequence[str]) -> None:
    """Have Gloo's groups that this process makes from now on listen at these ``addresses``.

    By itself Gloo listens at the address of this host's name, often 127.0.0.1, or at the first
    address of an interface that is named to it, which is of IPv4 if it has one. Nothing of torch's
    takes an address for the groups that torch makes, so the constructor does.
    """
    _addresses[:] = addresses
    kind: Any = dist.ProcessGroupGloo
    if hasattr(kind.__init__, "__wrapped__"):
        return
    make = kind.__init__

    @functools.wraps(make)
    def bound(self: object, *ranks: Any, **given: Any) -> None:
        if _addresses and given.keys() == {"timeout"}:  # else the caller names devices
            options = kind._Options()
            options._timeout = given.pop("timeout")
            options._devices = [kind.create_device(hostname=address) for address in _addresses]
            options._threads = 2 * len(_addresses)  # as torch itself has it
            ranks += (options,)
        make(self, *ranks, **given)

    kind.__init__ = bound


def ranks_by_host(store: dist.Store, rank: int, size: int, timeout: float) -> list[list[int]]:
    """Return the ranks of each host, both in order; every rank must call it.

    Ranks are of one host here if they can share memory: if they run on one kernel, in one
    network namespace (containers often don't), and as one user.

    Raises:
        RendezvousFailed: If a rank doesn't come within ``timeout`` seconds.
    """
    with within_reach() as name:
        note = f"{name} {is_told_apart():d} {this_memory()}"
        notes = _exchanged(store, "host", note, rank, size, timeout)
        names, are_told, hosts = zip(*(f"{each}  ".split(" ", 2) for each in notes), strict=True)
        if not all(told == "1" for told in are_told):
            # Virtual machines may be copies of one; init() has seen to that, if it was called.
            first = first_here(names, hosts, rank)
            hosts = tuple(_exchanged(store, "its host", str(first), rank, size, timeout))
    by_host: dict[str, list[int]] = {}
    for other, host in enumerate(hosts):
        by_host.setdefault(host, []).append(other)
    return list(by_host.values())


def _exchanged(
    store: dist.Store, subject: str, note: str, rank: int, size: int, timeout: float
) -> list[str]:
    """Return the notes of all ranks of a group; see :func:`ranks_by_host`."""
    keys = [f"{subject}/{other}" for other in range(size)]

    def exchange() -> list[str]:
        store.set(keys[rank], note)
        store.wait(keys, timedelta(seconds=timeout))
        found = [text_in(store.get(key)) for key in keys]
        found[rank] = note
        return found

    try:
        return answered(exchange, timeout + STORE_SECONDS)
    except RuntimeError as error:
        absent = "some ranks, as the store of the ranks doesn't tell,"
        with suppress(RuntimeError):
            there = answered(lambda: [store.check([key]) for key in keys], STORE_SECONDS)
            absent = f"the ranks {[other for other in range(size) if not there[other]]}"
        raise RendezvousFailed(
            f"Rank {rank} waited {timeout:g} s for {absent} to join the group. See whether they "
            "started, and whether they create the same groups in the same order."
        ) from error
