"""``parallel_apply``: a call of each of several modules, at the same time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn

from lockstep.nn.arguments import Device
from lockstep.nn.replicas.devices import as_device
from lockstep.nn.replicas.meeting import attending
from lockstep.nn.replicas.nested import leaves
from lockstep.nn.replicas.workers import WorkerThreads, values_of


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
        ValueError: If there aren't as many of each.
        BaseException: What the first replica that failed has raised, with a note that says which
            one it was and where, and others on those that failed as well.
    """
    kwargs = [{}] * len(modules) if kwargs_tup is None else kwargs_tup
    given = [None] * len(modules) if devices is None else devices
    counts = (len(modules), len(inputs), len(kwargs), len(given))
    if len(set(counts)) > 1:
        raise ValueError(
            "There must be as many modules as inputs, kwargs_tup and devices, and there are "
            "{}, {}, {} and {}.".format(*counts)
        )
    arguments = [tuple(x) if isinstance(x, tuple | list) else (x,) for x in inputs]
    where = [
        _device_of_first_tensor((args, kw)) if device is None else as_device(device)
        for device, args, kw in zip(given, arguments, kwargs, strict=True)
    ]
    tasks = [
        on_device(device, partial(module, *args, **kw))
        for module, args, kw, device in zip(modules, arguments, kwargs, where, strict=True)
    ]
    if len(tasks) < 2:
        return [task() for task in tasks]
    workers = WorkerThreads(len(tasks))
    try:
        return values_of(workers.run(attending(tasks)), where)
    finally:
        workers.close()


def on_device(device: torch.device, task: Callable[[], Any]) -> Callable[[], Any]:
    """``task`` with ``device`` as the current one, and the stream there that is now current."""
    if device.type in ("cpu", "meta"):
        return task
    stream = torch.accelerator.current_stream(device)

    def run() -> Any:
        with ExitStack() as entered:
            entered.enter_context(torch.accelerator.device_index(device.index))
            entered.enter_context(stream)
            return task()

    return run


def _device_of_first_tensor(arguments: object) -> torch.device:
    tensors = (leaf for _, leaf in leaves(arguments) if isinstance(leaf, torch.Tensor))
    return next((tensor.device for tensor in tensors), torch.device("cpu"))
