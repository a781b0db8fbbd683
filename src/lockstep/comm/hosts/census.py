"""Which ranks reach each other's memory."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from lockstep.errors import RendezvousFailed


def take_census(store: dist.Store, rank: int, size: int, timeout: float) -> list[list[int]]:
    """Return the ranks of each host, both in order; every rank must call it.

    Ranks are of one host here if they can share memory: if they run on one kernel, in one
    network namespace (containers often don't), and as one user.

    Raises:
        RendezvousFailed: If a rank doesn't come within ``timeout`` seconds.
    """
    store.set(f"host/{rank}", _this_host())
    keys = [f"host/{other}" for other in range(size)]
    try:
        store.wait(keys, timedelta(seconds=timeout))
    except RuntimeError as error:
        absent = [other for other, key in enumerate(keys) if not store.check([key])]
        raise RendezvousFailed(
            f"Rank {rank} waited {timeout:g} s for the ranks {absent} to join the group. See "
            "whether they started, and whether they create the same groups in the same order."
        ) from error
    hosts: dict[bytes, list[int]] = {}
    for other, key in enumerate(keys):
        hosts.setdefault(bytes(store.get(key)), []).append(other)
    return list(hosts.values())


def _this_host() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id")
    kernel = boot.read_text().strip() if boot.exists() else socket.gethostname()
    network = os.stat("/proc/self/ns/net").st_ino if os.path.exists("/proc/self/ns/net") else 0
    return f"{kernel} {network} {os.geteuid()}"
