"""Ranks of a shared-memory transport, each in a thread, without a group around it."""

import contextlib
import gc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist

from lockstep.comm import Signature
from lockstep.comm.shm.transport import ShmTransport
from lockstep.deadline import Deadline

A, B = Signature("all_reduce", torch.float32, (3,), "SUM"), Signature("barrier")


def run_each(*calls: Callable[[], object]) -> list[object]:
    """Run all at once; return what each returned or raised."""
    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(call) for call in calls]
        return [future.exception() or future.result() for future in futures]


def join_all(size: int) -> list[ShmTransport]:
    store = dist.HashStore()
    teams = run_each(
        *(lambda rank=rank: ShmTransport(store, rank, size, 10) for rank in range(size))
    )
    assert all(isinstance(team, ShmTransport) for team in teams), teams
    return teams  # type: ignore[return-value]


@contextlib.contextmanager
def joined(size: int) -> Iterator[list[ShmTransport]]:
    teams = join_all(size)
    try:
        yield teams
    finally:
        for team in teams:
            team.leave()
        gc.collect()


def die(team: ShmTransport) -> None:
    """What the others see of a rank when its process is killed."""
    team.close()


def meet_all(teams: list[ShmTransport], call: Signature = A, timeout: float = 5) -> list[object]:
    return run_each(
        *(lambda team=team: team.exchange(call, 0, Deadline(timeout)) for team in teams)
    )
