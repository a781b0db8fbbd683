"""``parallel_apply``: a call of each of several modules, at the same time."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from lockstep.arguments import Device
from lockstep.nn.replicas.devices import as_device
from lockstep.nn.replicas.meeting import attending
from lockstep.nn.replicas.nested import leaves
from lockstep.nn.replicas.scatter import check_kwargs
from lockstep.nn.replicas.workers import WorkerThreads, values_of

T = TypeVar("T")


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


def _listed(values: Iterable[T], name: str) -> Sequence[T]:
    is_scalar = isinstance(values, torch.Tensor) and values.ndim == 0
    is_one = is_scalar or isinstance(values, str | Mapping)
    if is_one or not isinstance(values, Iterable):
        raise TypeError(f"{name} is {reprlib.repr(values)}; give a list, with one for each module.")
    return values if isinstance(values, Sequence) else list(values)


def _device_of_first_tensor(arguments: object) -> torch.device:
    tensors = (leaf for _, leaf in leaves(arguments) if isinstance(leaf, torch.Tensor))
    return next((tensor.device for tensor in tensors), torch.device("cpu"))
