"""The ranks of several hosts, and the leaders among them."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from lockstep.comm.hosts.network import Network
from lockstep.comm.shm.transport import ShmTransport
from lockstep.comm.transport import Ranks
from lockstep.errors import CollectiveFailed, RendezvousFailed


class HostsTransport(Ranks):
    """Ranks of several hosts; those of one host reach each other's memory.

    Attributes:
        host: The index of this host in ``hosts``.
        is_leader: Whether this is the first rank of its host.
        everyone: The network of all ranks.
        leaders: The network of the leaders, on those.

    Args:
        store: A store that is this group's alone.
        rank: This rank.
        hosts: The ranks of each host.
        local: The transport between those of this host.
        timeout: How many seconds to wait for the others to connect.
        members: The ranks as the whole run numbers them, for errors.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        hosts: Sequence[Sequence[int]],
        local: ShmTransport,
        timeout: float,
        members: Sequence[int] | None = None,
    ) -> None:
        self._positions = {r: (h, i) for h, ranks in enumerate(hosts) for i, r in enumerate(ranks)}
        self.rank = rank
        self.size = len(self._positions)
        self.local = local
        self.hosts = hosts
        members = list(members or range(self.size))
        self._name = members[rank]
        self.host, index = self._positions[rank]
        self.is_leader = index == 0
        everyone = dist.PrefixStore("everyone/", store)
        self.everyone = Network(everyone, members, self._name, timeout)
        self.mailbox = self.everyone
        self.leaders: Network | None = None
        if self.is_leader:
            leaders = [members[ranks[0]] for ranks in hosts]
            self.leaders = Network(
                dist.PrefixStore("leaders/", store), leaders, self._name, timeout
            )

    def position_of(self, rank: int) -> tuple[int, int]:
        """The index of the host of ``rank``, and the index of ``rank`` among its ranks."""
        return self._positions[rank]

    def empty(self, num_bytes: int) -> torch.Tensor:
        """Return new memory, as bytes, that the ranks of this host reduce in place."""
        return self.local.empty(num_bytes)

    def break_off(self, error: CollectiveFailed) -> CollectiveFailed:
        """Tell all other ranks why this one goes no further."""
        first = self.local.break_off(error)
        if self.leaders is not None:
            self.leaders.break_off(error)
        return first

    def after_fork(self) -> None:
        """Have later calls raise GroupClosed, in a forked child."""
        self.local.after_fork()

    def check_open(self) -> None:
        """Raise what broke this group, if something did."""
        self.local.check_open()

    def abort(self, why: str = "") -> None:
        """Make every wait of this rank, and of the others, end with an error."""
        super().abort(why)
        self._close_network()

    def leave(self) -> None:
        """Tell the others that this rank takes no further part, and let go of everything."""
        self.local.leave()
        self._close_network()

    def _close_network(self) -> None:
        self.everyone.close()
        if self.leaders is not None:
            self.leaders.close()


def ranks_by_host(store: dist.Store, rank: int, size: int, timeout: float) -> list[list[int]]:
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
