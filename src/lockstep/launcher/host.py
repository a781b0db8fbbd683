"""Which ranks run on this host, with which environment, and the store they meet at."""

from __future__ import annotations

import os
import socket
import sys
import uuid
from typing import NamedTuple

from lockstep.launcher.job import Job, Meeting
from lockstep.launcher.peers import Peers
from lockstep.world.environment import STORE, rank_environment

_BACKLOG = 1024  # every rank may connect before the store accepts the first


class Host(NamedTuple):
    """This host's share of a run.

    Attributes:
        ranks: The ranks that run here.
        world_size: How many run everywhere.
        environments: The variables that each of ``ranks`` gets.
    """

    ranks: range
    world_size: int
    environments: list[dict[str, str]]


def alone(job: Job) -> tuple[Host, int]:
    """The place of the only host.

    Returns:
        The place, and the descriptor of a socket that listens for a store. That is the
        supervisor's rather than rank 0's, so no rank's end takes it away.
    """
    # Port 0: the kernel finds a free one, so that two runs never collide.
    listener = socket.create_server(("127.0.0.1", 0), backlog=_BACKLOG)
    port = listener.getsockname()[1]
    size = job.num_ranks
    environments = _environments(job, uuid.uuid4().hex, ("127.0.0.1", port), range(size), size)
    # Any user of this host can write to a store on loopback. It is for what expects one there;
    # lockstep.init() uses a file without a name, which is open in this process alone.
    if sys.platform == "linux":
        path = f"/proc/{os.getpid()}/fd/{os.memfd_create('lockstep-store')}"
        environments = [environment | {STORE: f"{port}:{path}"} for environment in environments]
    return Host(range(size), size, environments), listener.detach()


def among(peers: Peers, job: Job, meeting: Meeting) -> Host:
    """The place of one host of several, whose ranks meet at the store where the hosts did."""
    first, world_size = sum(peers.sizes[: peers.host]), sum(peers.sizes)
    ranks = range(first, first + job.num_ranks)
    master = (meeting.address, meeting.port)
    environments = _environments(job, meeting.run_id, master, ranks, world_size)
    of_host = {"GROUP_RANK": str(peers.host), "GROUP_WORLD_SIZE": str(len(peers.sizes))}
    return Host(ranks, world_size, [environment | of_host for environment in environments])


def _environments(
    job: Job, run_id: str, master: tuple[str, int], ranks: range, world_size: int
) -> list[dict[str, str]]:
    return [
        rank_environment(
            run_id=run_id,
            rank=rank,
            world_size=world_size,
            local_rank=rank - ranks.start,
            local_world_size=len(ranks),
            master=master,
            num_threads=job.num_threads,
        )
        for rank in ranks
    ]
