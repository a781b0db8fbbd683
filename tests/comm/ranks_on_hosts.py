"""Ranks as threads, on hosts as they are told to be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist

from lockstep.comm.group import SharedMemoryGroup
from lockstep.comm.hosts import HostsCollectives, HostsTransport
from tests.ranks import run_ranks


def hosts_group(
    store: dist.Store, rank: int, hosts: Sequence[Sequence[int]], seconds: float = 20
) -> SharedMemoryGroup:
    team = HostsTransport(store, rank, hosts, seconds)
    return SharedMemoryGroup(team, "shm", timedelta(seconds=seconds), store, HostsCollectives)


def run_hosts(
    hosts: Sequence[Sequence[int]],
    body: Callable[[int, SharedMemoryGroup], object],
    seconds: float = 20,
) -> list[object]:
    store = dist.HashStore()

    def run(rank: int, gloo: dist.ProcessGroup) -> object:
        group = hosts_group(store, rank, hosts, seconds)
        try:
            return body(rank, group)
        finally:
            group.shutdown()

    return run_ranks(sum(map(len, hosts)), run)
