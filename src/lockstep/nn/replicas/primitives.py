"""``replicate``: copies of a module, one for each device; ``parallel_apply``: calls of them."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import nn

from lockstep.arguments import Device
from lockstep.nn.replicas.devices import as_device, as_devices, on_device
from lockstep.nn.replicas.group import as_replicas
from lockstep.nn.replicas.linked_embedding import as_linked, linked_embeddings_in
from lockstep.nn.replicas.module_copy import ModuleCopy, check_module, check_shapes, own_tensors
from lockstep.nn.replicas.nested import leaves
from lockstep.nn.replicas.scatter_gather import check_kwargs
from lockstep.nn.replicas.worker_threads import WorkerThreads, values_of

T = TypeVar("T")
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
    linked = linked_embeddings_in(parts)
    is_taken: set[int] = set()
    for device in as_devices(devices, "devices"):
        replica = ModuleCopy(network)
        tensors = {}
        for parameter in parameters:
            there = parameter if parameter.device == device else parameter.to(device)
            there = there.detach() if detach else there
            tensors[id(parameter)] = as_linked(there) if id(parameter) in linked else there
        for buffer in buffers:
            if buffer.device == device and id(buffer) not in is_taken:
                is_taken.add(id(buffer))
                tensors[id(buffer)] = buffer
            else:
                tensors[id(buffer)] = _copy(buffer, device, detach=detach)
        replica.update(tensors)
        replicas.append(cast(Network, replica.module))
    return replicas


def _copy(buffer: torch.Tensor, device: torch.device, *, detach: bool) -> torch.Tensor:
    copied = buffer.to(device, copy=True)
    return copied.detach() if detach else copied


def parallel_apply(
    modules: Sequence[nn.Module],
    inputs: Sequence[Any],
    kwargs_tup: Sequence[Mapping[str, Any]] | None = None,
    devices: Sequence[Device | None] | None = None,
) -> list[Any]:
    """Call each of ``modules`` on its inputs, each in a thread of its own.

    In the threads all is as in the caller's: grad mode, inference mode, autocast with its dtype,
    the default device and dtype, context variables, and each accelerator's current stream.

    Args:
        modules: What to call.
        inputs: For each the positional arguments, as a tuple or list, or else the only one.
        kwargs_tup: For each the keyword arguments.
        devices: For each the device to make the current one; by default that of the first tensor
            among its inputs.

    Returns:
        What each has returned.

    Raises:
        TypeError: If an argument is no list, or what it has for a module can't be used.
        ValueError: If there aren't as many of each, or a device isn't there.
        BaseException: What the first replica that failed has raised, with a note that says which
            one it was and where, and others on those that failed as well.
    """
    called, inputs = _listed(modules, "modules"), _listed(inputs, "inputs")
    kwargs = [{}] * len(called) if kwargs_tup is None else _listed(kwargs_tup, "kwargs_tup")
    given = [None] * len(called) if devices is None else _listed(devices, "devices")
    counts = (len(called), len(inputs), len(kwargs), len(given))
    if len(set(counts)) > 1:
        raise ValueError(
            "There must be as many modules as inputs, kwargs_tup and devices, and there are "
            "{}, {}, {} and {}.".format(*counts)
        )
    for index, module in enumerate(called):
        if not callable(module):
            raise TypeError(f"modules[{index}] is {reprlib.repr(module)}; give a torch.nn.Module.")
    for index, each in enumerate(kwargs):
        check_kwargs(each, f"kwargs_tup[{index}]")
    kwargs = [each or {} for each in kwargs]
    arguments = [tuple(x) if isinstance(x, tuple | list) else (x,) for x in inputs]
    where = [
        _device_of_first_tensor((args, kw))
        if device is None
        else as_device(device, f"devices[{index}]")
        for index, (device, args, kw) in enumerate(zip(given, arguments, kwargs, strict=True))
    ]
    tasks = [
        on_device(device, partial(module, *args, **kw))
        for module, args, kw, device in zip(called, arguments, kwargs, where, strict=True)
    ]
    if len(tasks) < 2:
        return [task() for task in tasks]
    workers = WorkerThreads(len(tasks))
    try:
        with workers.sharing():
            return values_of(workers.run(as_replicas(tasks)), where)
    finally:
        workers.close()


def _listed(values: Iterable[T], name: str) -> Sequence[T]:
    is_scalar = isinstance(values, torch.Tensor) and values.ndim == 0
    is_one = is_scalar or isinstance(values, str | Mapping)
    if is_one or not isinstance(values, Iterable):
        raise TypeError(f"{name} is {reprlib.repr(values)}; give a list, with one for each module.")
    return values if isinstance(values, Sequence) else list(values)


def _device_of_first_tensor(arguments: object) -> torch.device:
    tensors = (leaf for _, leaf in leaves(arguments) if isinstance(leaf, torch.Tensor))
    return next((tensor.device for tensor in tensors), torch.device("cpu"))
