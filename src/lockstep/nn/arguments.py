"""What the arguments of torch's DistributedDataParallel mean."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lockstep.arguments import as_device, check_type
from lockstep.world import group_or_all

Device = int | str | torch.device


def group_of(mesh: DeviceMesh | None, group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The ranks that a mesh or a group names; by default all of ``lockstep.init()``."""
    if mesh is None:
        return group_or_all(group)
    check_type("device_mesh", mesh, DeviceMesh, "a DeviceMesh, as init_device_mesh() makes it")
    if group is not None:
        raise RuntimeError("Give a process_group or a device_mesh, not both.")
    if mesh.ndim != 1:
        raise RuntimeError(
            f"device_mesh has {mesh.ndim} dimensions, but must have one: that of the replicas. "
            "Take it out of the mesh by its name, as in mesh['dp']."
        )
    return mesh.get_group(0)


def only_device(device_ids: Sequence[Device] | None) -> torch.device | None:
    """The device that ``device_ids`` names, if it does."""
    check_type(
        "device_ids", device_ids, list | tuple | None, "a list of the one device of this rank"
    )
    if not device_ids:
        return None
    if len(device_ids) > 1:
        raise ValueError(
            f"device_ids names {len(device_ids)} devices, but a rank has one. Start a rank for "
            "each, with 'lockstep run -n', or leave device_ids out."
        )
    device = device_ids[0]
    is_number = isinstance(device, int) and not isinstance(device, bool)
    return as_device("device_ids[0]", f"cuda:{device}" if is_number else device)
