"""Ranks as threads, on hosts as they are told to be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from lockstep.comm import SharedMemoryGroup
from lockstep.comm.hosts import HostsCollectives, HostsTransport, Network
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


def noted_sends(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The collectives between hosts from now on, by their names."""
    sent, run = list[str](), HostsCollectives._run

    def noting(self: HostsCollectives, network: Network, method: str, *rest: object) -> None:
        sent.append(method)
        run(self, network, method, *rest)

    monkeypatch.setattr(HostsCollectives, "_run", noting)
    return sent


def noted_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes that ranks send to other hosts in an all-to-all from now on, by call."""
    sent, run = list[int](), HostsCollectives._run

    def noting(self: HostsCollectives, network: Network, method: str, *rest: Any) -> None:
        if method == "alltoall_base":
            here = self._transport.hosts[self._transport.host]
            sent.append(sum(size for rank, size in enumerate(rest[3]) if rank not in here))
        run(self, network, method, *rest)

    monkeypatch.setattr(HostsCollectives, "_run", noting)
    return sent
