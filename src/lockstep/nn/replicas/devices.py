"""Devices: those that arguments name, and how tensors and tasks get there."""

from __future__ import annotations

import operator
import reprlib
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import TypeVar

import torch

from lockstep.arguments import Device

T = TypeVar("T")


def as_device(device: Device, name: str) -> torch.device:
    """The device named; an int is the index of an accelerator, and -1 the CPU, as in torch.

    Args:
        device: Its name, index or itself.
        name: The name of the argument, for errors.

    Raises:
        TypeError: If it is nothing that names a device.
        ValueError: If there is no such device here.
    """
    if isinstance(device, bool) or not isinstance(device, int | str | torch.device):
        raise TypeError(
            f"{name} is {reprlib.repr(device)}, which names no device. Give an accelerator's "
            "index, a name such as 'cpu', or a torch.device."
        )
    if not isinstance(device, int):
        try:
            named = torch.device(device)
            # As tensors there say: the CPU has no index, and others have one.
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
    """The devices named; see :func:`as_device`.

    Raises:
        TypeError: If they aren't several, or one is nothing that names a device.
        ValueError: If one isn't here.
    """
    if isinstance(devices, str | torch.Tensor) or not isinstance(devices, Iterable):
        raise TypeError(
            f"{name} is {reprlib.repr(devices)}; give a list of devices, as ['cpu', 'cpu'] or "
            "[0, 1]."
        )
    return [as_device(device, f"{name}[{i}]") for i, device in enumerate(devices)]


def as_dim(dim: int) -> int:
    """The same dimension, as an int.

    Raises:
        TypeError: If it is no whole number.
    """
    try:
        return operator.index(dim)
    except TypeError:
        raise TypeError(f"dim is {reprlib.repr(dim)}; give a whole number, such as 0.") from None


def move(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``tensor`` on ``device``: itself if it is there, else a copy that gradients flow back from.

    A copy to a CPU is waited for: the program could read it before it is complete.
    """
    return tensor.to(device, non_blocking=device.type != "cpu")


def on_device(device: torch.device, task: Callable[[], T]) -> Callable[[], T]:
    """``task`` with ``device`` and the stream that is now current there as the current ones."""
    if device.type in ("cpu", "meta"):
        return task
    stream = torch.accelerator.current_stream(device)

    def run() -> T:
        with ExitStack() as entered:
            entered.enter_context(torch.accelerator.device_index(device.index))
            entered.enter_context(stream)
            return task()

    return run
