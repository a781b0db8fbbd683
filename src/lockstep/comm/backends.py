"""The names by which torch.distributed knows lockstep's process groups.

Importing torch imports this, maybe because a module of lockstep imports torch, so that this must
import neither torch nor what does.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import timedelta

    import torch.distributed as dist

    from lockstep.comm.group import SharedMemoryGroup
    from lockstep.torch_private import _DistributedBackendOptions

SHM = "shm"
THREADS = "threads"


def register_backends() -> None:
    """Make ``"shm"`` and ``"threads"`` backends of torch.distributed; a second call does nothing.

    Importing torch calls it where lockstep is installed (it is an entry point of the
    group ``torch.backends``); so does :func:`lockstep.init`.
    """
    import torch.distributed as dist

    for name, create in ((SHM, _create_shm), (THREADS, _create_threads)):
        if name not in dist.Backend.backend_list:
            dist.Backend.register_backend(name, create, extended_api=True, devices=["cpu"])


def _unused_store(options: _DistributedBackendOptions) -> dist.Store:
    """Return a part of the store that no earlier group has used."""
    import torch.distributed as dist

    from lockstep.comm.failures import STORE_SECONDS, answered, silent_store

    # After destroy_process_group() torch gives the same names to new groups, and a store may
    # outlive groups (torchrun's does). Ranks create groups in the same order, so each counts for
    # itself. Shown by test_ranks_may_come_to_a_second_group_long_after_each_other.
    rank = options.group_rank
    try:
        times = answered(partial(options.store.add, f"joined/{rank}", 1), STORE_SECONDS)
    except RuntimeError as error:
        raise silent_store(f"Rank {rank} of {options.group_size} can't join", error) from error
    return dist.PrefixStore(f"{times}/", options.store)


def shared_memory_group(
    store: dist.Store, rank: int, size: int, timeout: timedelta, members: Sequence[int]
) -> SharedMemoryGroup:
    """Connect processes that meet in a part of a ``store`` that nothing else has used.

    Args:
        store: Where they meet.
        rank: That of this process.
        size: The number of ranks.
        timeout: How long they wait for each other, now and in each call.
        members: The ranks as the whole run numbers them.
    """
    from lockstep.comm.group import SharedMemoryGroup
    from lockstep.comm.hosts import HostsCollectives, HostsTransport
    from lockstep.comm.network import ranks_by_host
    from lockstep.comm.shm.transport import ShmTransport

    seconds = timeout.total_seconds()
    hosts = ranks_by_host(store, rank, size, seconds)
    if len(hosts) == 1:
        shm = ShmTransport(store, rank, size, seconds, members)
        return SharedMemoryGroup(shm, SHM, timeout, store)
    transport = HostsTransport(store, rank, hosts, seconds, members)
    return SharedMemoryGroup(transport, SHM, timeout, store, HostsCollectives)


def _create_shm(options: _DistributedBackendOptions, _: object) -> dist.ProcessGroup:
    ranks = options.group_rank, options.group_size
    members = options.global_ranks_in_group
    return shared_memory_group(_unused_store(options), *ranks, options.timeout, members)


def _create_threads(options: _DistributedBackendOptions, _: object) -> dist.ProcessGroup:
    from lockstep.comm.group import SharedMemoryGroup
    from lockstep.comm.threads.transport import join

    rank, size, store = options.group_rank, options.group_size, _unused_store(options)
    seconds = options.timeout.total_seconds()
    transport = join(store, rank, size, seconds, options.global_ranks_in_group)
    return SharedMemoryGroup(transport, THREADS, options.timeout, store)
