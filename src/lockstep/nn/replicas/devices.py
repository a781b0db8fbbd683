"""Moving tensors and tasks to devices; checks of arguments."""

from __future__ import annotations

import operator
import reprlib
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import torch
from torch import nn

from lockstep.arguments import Device

T = TypeVar("T")


def as_device(device: Device, name: str) -> torch.device:
    """Return argument ``name`` as a device; an int is an accelerator's index, or -1 for the CPU."""
    if isinstance(device, bool) or not isinstance(device, int | str | torch.device):
        raise TypeError(
            f"{name} is {reprlib.repr(device)}, which names no device. Give an accelerator's "
            "index, a name such as 'cpu', or a torch.device."
        )
    if not isinstance(device, int):
        try:
            named = torch.device(device)
            # As Tensor.device has it: without an index for the CPU, and with one otherwise.
            is_cpu = named.type == "cpu"
            return torch.device("cpu") if is_cpu else torch.empty(0, device=named).device
        except (RuntimeError, AssertionError) as error:  # torch raises either
            raise ValueError(
                f"{name} is {str(device)!r}, and there is no such device here. Name another, such "
                "as 'cpu'."
            ) from error
    if device == -1:
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    count = torch.accelerator.device_count() if accelerator else 0
    if accelerator is None or not 0 <= device < count:
        raise ValueError(
            f"{name} is {device}, which is to be an accelerator's index, but there are {count} "
            "here. Name another device, such as 'cpu'."
        )
    return torch.device(accelerator.type, device)


def as_devices(devices: Iterable[Device], name: str) -> list[torch.device]:
    """Return argument ``name`` as a list of devices."""
    if isinstance(devices, str | torch.Tensor) or not isinstance(devices, Iterable):
        raise TypeError(
            f"{name} is {reprlib.repr(devices)}; give a list of devices, as ['cpu', 'cpu'] or "
            "[0, 1]."
        )
    return [as_device(device, f"{name}[{i}]") for i, device in enumerate(devices)]


def as_dim(dim: int) -> int:
    """Return ``dim`` as an int; raise TypeError if it isn't a whole number."""
    try:
        return operator.index(dim)
    except TypeError:
        raise TypeError(f"dim is {reprlib.repr(dim)}; give a whole number, such as 0.") from None


def check_module(module: object, name: str) -> None:
    """Raise TypeError if an argument isn't a module."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"{name} is {reprlib.repr(module)}; give a torch.nn.Module.")


def check_kwargs(kwargs: object, name: str) -> None:
    """Raise TypeError unless ``kwargs`` is None or a mapping with names as keys."""
    if kwargs is None:
        return
    if not isinstance(kwargs, Mapping) or not all(isinstance(key, str) for key in kwargs):
        raise TypeError(f"{name} is {reprlib.repr(kwargs)}; give a dict of arguments by name.")


def move(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return ``tensor`` if it is on ``device``, else a differentiable copy there.

    A copy to the CPU blocks, as the program could read it before it is complete.
    """
    return tensor.to(device, non_blocking=device.type != "cpu")


def on_device(device: torch.device, task: Callable[[], T]) -> Callable[[], T]:
    """Return ``task`` with ``device``, and its stream that is current now, as current ones."""
    if device.type in ("cpu", "meta"):
        return task
    stream = torch.accelerator.current_stream(device)

    def run() -> T:
        with torch.accelerator.device_index(device.index), stream:
            return task()

    return run
