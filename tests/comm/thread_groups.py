"""Groups of ranks that are threads, and what becomes of each rank."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from lockstep.comm import THREADS, SharedMemoryGroup
from lockstep.comm.threads.transport import ThreadTransport, ThreadTransportState

SOON, LATER = 1.0, 20.0


def outcomes(
    size: int, body: Callable[[int, SharedMemoryGroup], Any], timeout: float = LATER
) -> list[Any]:
    """What ``body`` returns on each rank, or raises."""
    room = ThreadTransportState(size)
    found: dict[int, Any] = {}
    groups: list[weakref.ref[SharedMemoryGroup]] = []

    def run(rank: int) -> None:
        try:
            group = SharedMemoryGroup(
                ThreadTransport(room, rank), THREADS, timedelta(seconds=timeout)
            )
            groups.append(weakref.ref(group))
            found[rank] = body(rank, group)
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    # Not before: a rank that doesn't leave is what some of the tests are about.
    for alive in [group for group in (reference() for reference in groups) if group is not None]:
        alive.shutdown()
    assert not any(thread.is_alive() for thread in threads)
    return [found[rank] for rank in range(size)]


def all_reduce(group: SharedMemoryGroup, numel: int = 1) -> torch.Tensor:
    tensor = torch.ones(numel)
    group.allreduce([tensor]).wait()
    return tensor
