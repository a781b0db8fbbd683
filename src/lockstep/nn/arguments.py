"""What the arguments of torch's DistributedDataParallel mean."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
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


def only_device(
    module: nn.Module, device_ids: Sequence[Device] | None, output_device: Device | None
) -> torch.device | None:
    """The device that ``device_ids`` names, if it does: that of ``module``."""
    check_type(
        "device_ids", device_ids, list | tuple | None, "a list of the one device of this rank"
    )
    if output_device is not None:
        _device_of(module, "output_device", output_device)
    if not device_ids:
        return None
    if len(device_ids) > 1:
        raise ValueError(
            f"device_ids names {len(device_ids)} devices, but a rank has one. Start a rank for "
            "each, with 'lockstep run -n', or leave device_ids out."
        )
    return _device_of(module, "device_ids", device_ids[0])


def _device_of(module: nn.Module, name: str, named: Device) -> torch.device:
    devices = {parameter.device for parameter in module.parameters()}
    is_number = isinstance(named, int) and not isinstance(named, bool)
    argument = f"{name}[0]" if name == "device_ids" else name
    device = as_device(argument, f"cuda:{named}" if is_number else named)
    for other in devices:
        if other.type != device.type or device.index not in (None, other.index):
            raise ValueError(
                f"{name} names {device}, but the model is on {', '.join(map(str, devices))}. Leave "
                f"{name} out, or move the model there first."
            )
    return device
