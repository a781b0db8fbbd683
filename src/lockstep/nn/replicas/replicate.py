"""``replicate``: a module for each device, all with the same parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar, cast

import torch
from torch import nn

from lockstep.arguments import Device
from lockstep.nn.replicas.devices import as_devices
from lockstep.nn.replicas.tables import as_table, tables_in
from lockstep.nn.replicas.twins import Twin, check_module, check_shapes, own_tensors

Network = TypeVar("Network", bound=nn.Module)


def replicate(network: Network, devices: Sequence[Device], detach: bool = False) -> list[Network]:
    """Return a replica of ``network`` for each of ``devices``.

    A replica is of the same class and has the same attributes. Where it is on the device of a
    parameter, it has that parameter itself, and elsewhere a copy through which gradients flow back
    to it; so gradients of all replicas add up in ``network``. The first replica on the device of a
    buffer has the buffer itself, so that what it does to it stays; all others have copies.

    Args:
        network: A module, on any devices.
        devices: Where replicas are wanted: indices of accelerators, names, devices, also
            several times the same.
        detach: Whether gradients end at the replicas' parameters.

    Returns:
        The replicas, in the order of ``devices``.

    Raises:
        TypeError: If ``network`` is no module, or has a ScriptModule in it.
        ValueError: If a device isn't there.
        RuntimeError: If a parameter has no shape yet.
    """
    check_module(network, "network")
    parts = list(network.modules())
    parameters = list(own_tensors(parts, "_parameters"))
    buffers = list(own_tensors(parts, "_buffers"))
    check_shapes([*parameters, *buffers])
    replicas = []
    tables = tables_in(parts)
    is_taken: set[int] = set()
    for device in as_devices(devices, "devices"):
        twin = Twin(network)
        tensors = {}
        for parameter in parameters:
            there = parameter if parameter.device == device else parameter.to(device)
            there = there.detach() if detach else there
            tensors[id(parameter)] = as_table(there) if id(parameter) in tables else there
        for buffer in buffers:
            if buffer.device == device and id(buffer) not in is_taken:
                is_taken.add(id(buffer))
                tensors[id(buffer)] = buffer
            else:
                tensors[id(buffer)] = _copy(buffer, device, detach=detach)
        twin.take_after(tensors)
        replicas.append(cast(Network, twin.module))
    return replicas


def _copy(buffer: torch.Tensor, device: torch.device, *, detach: bool) -> torch.Tensor:
    copied = buffer.to(device, copy=True)
    return copied.detach() if detach else copied
