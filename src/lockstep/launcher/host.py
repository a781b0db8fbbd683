"""Which ranks run on this host, with which environment, and the store they meet at."""

from __future__ import annotations

import socket
import uuid
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

from lockstep.launcher.job import Job
from lockstep.launcher.peers import Peers
from lockstep.world.environment import RUN_ID, rank_environment

if TYPE_CHECKING:
    from torch.distributed import TCPStore

_STORE_TIMEOUT = timedelta(seconds=30)
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
        The place, and the descriptor of a socket that listens for :func:`open_store`.
    """
    # Port 0: the kernel finds a free one, so that two runs never collide.
    listener = socket.create_server(("127.0.0.1", 0), backlog=_BACKLOG)
    port = listener.getsockname()[1]
    return _the_only_one(job, port), listener.detach()


def open_store(listener: int | None) -> TCPStore | None:
    """Answer the ranks on ``listener``; it has threads, so fork first.

    The store is the supervisor's rather than rank 0's, so no rank's end takes it away. It is
    given a bound socket because it would bind one to every interface.
    """
    if listener is None:
        return None
    from torch.distributed import TCPStore

    port = _port_of(listener)
    return TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        timeout=_STORE_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listener,
    )


def _port_of(listener: int) -> int:
    with socket.socket(fileno=listener) as borrowed:
        port = borrowed.getsockname()[1]
        borrowed.detach()
    assert isinstance(port, int)
    return port


def _the_only_one(job: Job, port: int) -> Host:
    run_id, size = uuid.uuid4().hex, job.num_ranks
    environments = [
        rank_environment(
            run_id=run_id,
            rank=rank,
            world_size=size,
            master_port=port,
            num_threads=job.num_threads,
        )
        for rank in range(size)
    ]
    return Host(range(size), size, environments)


def among(peers: Peers, job: Job, environ: Mapping[str, str]) -> Host:
    """The place of one host of several, whose ranks meet at the store of their agents."""
    first, size = sum(peers.sizes[: peers.host]), job.num_ranks
    world_size = sum(peers.sizes)
    shared = {
        RUN_ID: environ["TORCHELASTIC_RUN_ID"],
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(size),
        "GROUP_RANK": str(peers.host),
        "GROUP_WORLD_SIZE": str(len(peers.sizes)),
        "OMP_NUM_THREADS": str(job.num_threads),
    }
    environments = [
        {**shared, "RANK": str(first + local_rank), "LOCAL_RANK": str(local_rank)}
        for local_rank in range(size)
    ]
    return Host(range(first, first + size), world_size, environments)
