"""The names by which torch.distributed knows lockstep's process groups."""

from __future__ import annotations

import torch.distributed as dist

SHM = "shm"


def register_backends() -> None:
    """Make ``"shm"`` a backend of torch.distributed; a second time it does nothing.

    Importing torch does it by itself where lockstep is installed (it is an entry point of the
    group ``torch.backends``), and so does :func:`lockstep.init`.
    """
    if SHM not in dist.Backend.backend_list:
        dist.Backend.register_backend(SHM, _create_shm, extended_api=True, devices=["cpu"])


def _create_shm(
    options: dist.distributed_c10d._DistributedBackendOptions, _: object
) -> dist.ProcessGroup:
    from lockstep.comm.group import TeamGroup
    from lockstep.comm.shm.team import ShmTeam

    team = ShmTeam(
        options.store, options.group_rank, options.group_size, options.timeout.total_seconds()
    )
    return TeamGroup(team, SHM, options.timeout, options.store)
