"""Ranks as threads of the test's process, each with its own end of a group.

A rank is a rank, whether thread or process: lockstep takes a process group and asks for no more.
Threads start in a millisecond, which is what makes property tests over ranks possible. The group
is lockstep's own for threads or, where the test asks for it, its own for processes or torch's Gloo.
A rank of ``"shm"`` is meant to be a process, and in a thread it is no other: its memory is mapped
once more for each rank, and its lines are sockets.
"""

from __future__ import annotations

import contextlib
import faulthandler
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Literal, TypeVar, get_args

import torch
import torch.distributed as dist

from lockstep.comm import SharedMemoryGroup
from lockstep.comm.shm.transport import ShmTransport
from lockstep.comm.threads.transport import join as join_threads
from lockstep.launcher.threads import one_start_at_a_time

Backend = Literal["threads", "gloo"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)
T = TypeVar("T")

TIMEOUT_SECONDS = 120
_LOOPBACK = "lo"


def gloo_group(
    store: dist.Store, rank: int, world_size: int, timeout_seconds: float
) -> dist.ProcessGroup:
    """A process group as ``init_process_group("gloo")`` makes it, but known to nobody."""
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(interface=_LOOPBACK)]
    options._timeout = timedelta(seconds=timeout_seconds)
    backend = dist.ProcessGroupGloo(store, rank, world_size, options)
    group = dist.ProcessGroup(store, rank, world_size)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    group._set_group_name(f"threads-{id(store)}")
    return group


def make_group(
    backend: str,
    store: dist.Store,
    rank: int,
    world_size: int,
    timeout_seconds: float,
    members: Sequence[int] | None = None,
) -> dist.ProcessGroup:
    """A process group as ``init_process_group(backend)`` makes it, but known to nobody."""
    if backend == "gloo":
        return gloo_group(store, rank, world_size, timeout_seconds)
    join = ShmTransport if backend == "shm" else join_threads
    transport = join(store, rank, world_size, timeout_seconds, members)
    return SharedMemoryGroup(transport, backend, timedelta(seconds=timeout_seconds), store)


def run_ranks(
    world_size: int,
    body: Callable[[int, dist.ProcessGroup], T],
    group_timeout_seconds: float = 20,
    backend: str = "threads",
    members: Sequence[int] | None = None,
) -> list[T]:
    """Run ``body(rank, group)`` on every rank and return the results in rank order.

    The first rank that raises fails the test with its own traceback. Ranks that don't come
    back in time fail it too, with the stacks of all of them.

    Args:
        world_size: The number of ranks.
        body: What each rank does.
        group_timeout_seconds: The group's timeout.
        backend: ``"gloo"``, ``"shm"`` or ``"threads"``.
        members: The ranks' numbers in the whole run, where the group is a part of it.
    """
    store = dist.HashStore()
    results: dict[int, T] = {}
    failures: list[tuple[int, BaseException]] = []
    connected = threading.Barrier(world_size)

    def connect(rank: int) -> dist.ProcessGroup:
        # A rank of Gloo's that leaves while another still connects to it fails the other.
        try:
            group = make_group(backend, store, rank, world_size, group_timeout_seconds, members)
        except BaseException:
            connected.abort()
            raise
        if backend == "gloo":
            with contextlib.suppress(threading.BrokenBarrierError):
                connected.wait(TIMEOUT_SECONDS)
        return group

    def run(rank: int) -> None:
        group = None
        try:
            group = connect(rank)
            results[rank] = body(rank, group)
        except BaseException as error:
            failures.append((rank, error))
        finally:
            # A model that is returned holds it, and it may hold a thread.
            if backend != "gloo" and group is not None:
                group.shutdown()

    threads = [
        threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True)
        for rank in range(world_size)
    ]
    with one_start_at_a_time():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_SECONDS)
    if stuck := [thread.name for thread in threads if thread.is_alive()]:
        faulthandler.dump_traceback()
        raise TimeoutError(f"{', '.join(stuck)} did not end within {TIMEOUT_SECONDS} s")
    if failures:
        rank, error = failures[0]
        error.add_note(f"(raised first on rank {rank} of {world_size}, over {backend})")
        raise error
    return [results[rank] for rank in range(world_size)]
