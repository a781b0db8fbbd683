"""The ranks of several hosts, and those among them who lead."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from lockstep.comm.hosts.messages import NetworkMailbox
from lockstep.comm.hosts.network import Network
from lockstep.comm.shm.transport import ShmTransport
from lockstep.comm.transport import Ranks
from lockstep.errors import CollectiveMismatch, CollectiveTimeout, PeerLost


class HostsTransport(Ranks):
    """Ranks of several hosts; those of one host reach each other's memory.

    Args:
        store: A store that is this group's alone.
        rank: Which of the ranks this is.
        hosts: The ranks of each host.
        local: Those of this host, as a team of their own.
        timeout: How many seconds to wait for the others to connect.
        members: What all of them are called in the whole run, by which errors name them.
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
        members = list(members or range(sum(map(len, hosts))))
        self.rank = rank
        # As errors name it.
        self.name = members[rank]
        self.size = sum(map(len, hosts))
        self.local = local
        self.hosts = hosts
        self._places = {r: (h, p) for h, ranks in enumerate(hosts) for p, r in enumerate(ranks)}
        self.host, place = self._places[rank]
        self.is_leader = place == 0
        everyone = dist.PrefixStore("everyone/", store)
        self.everyone = Network(everyone, members, members[rank], timeout)
        self.mailbox = NetworkMailbox(self.everyone)
        self.leaders: Network | None = None
        if self.is_leader:
            leading = [members[ranks[0]] for ranks in hosts]
            self.leaders = Network(
                dist.PrefixStore("leaders/", store), leading, members[rank], timeout
            )

    def place_of(self, rank: int) -> tuple[int, int]:
        """The host of ``rank``, and which of that host's ranks it is."""
        return self._places[rank]

    def empty(self, num_bytes: int) -> torch.Tensor:
        """Return new memory, as bytes, that the ranks of this host reduce in place."""
        return self.local.empty(num_bytes)

    def break_off(self, error: PeerLost | CollectiveTimeout | CollectiveMismatch) -> None:
        """Tell all other ranks why this one goes no further."""
        self.local.break_off(error)
        if self.leaders is not None:
            self.leaders.break_off(error)

    def check_open(self) -> None:
        """Raise what broke this group, if something did."""
        self.local.check_open()

    def abort(self, why: str = "") -> None:
        """Make every wait of this rank end with an error."""
        self.local.abort(why)
        self._close_network()

    def leave(self) -> None:
        """Tell the others that this rank takes no further part, and let go of everything."""
        self.local.leave()
        self._close_network()

    def _close_network(self) -> None:
        self.everyone.close()
        if self.leaders is not None:
            self.leaders.close()
