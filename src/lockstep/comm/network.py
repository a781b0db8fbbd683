"""The network of this host: what tells it from others, and where Gloo listens in it."""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

# One for each network interface that Gloo is to use; empty for Gloo's own choice.
_addresses: list[str] = []


def this_network() -> str:
    """The network of this host, or of this container, as no other is called."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    kernel = boot.read_text().strip() if boot.exists() else socket.gethostname()
    network = os.stat("/proc/self/ns/net").st_ino if os.path.exists("/proc/self/ns/net") else 0
    return f"{kernel} {network}"


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
