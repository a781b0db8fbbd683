"""Checks of the arguments of public functions.

Without them, a wrong argument fails inside torch or Python, with an error that doesn't name it. The
error of a check has the argument's name, its value, and in words the value that is wanted.
"""

from __future__ import annotations

import contextlib
import math
import operator
import reprlib
from collections.abc import Sequence
from types import UnionType

import torch
import torch.distributed as dist
from torch import nn

Device = int | str | torch.device


def refusal(name: str, value: object, wanted: str) -> str:
    """The message of an error about an argument; ``wanted`` describes a right one."""
    return f"{name} is {reprlib.repr(value)} ({type(value).__name__}), not {wanted}."


def check_type(name: str, value: object, kind: type | UnionType, wanted: str) -> None:
    """Raise TypeError unless ``value`` is an instance of ``kind``."""
    if not isinstance(value, kind):
        raise TypeError(refusal(name, value, wanted))


def check_module(module: object) -> None:
    """Raise TypeError unless ``module`` is a module."""
    check_type("module", module, nn.Module, "a torch.nn.Module")


def divided_by_torch(value: object) -> str:
    """What a DTensor, or torch's older ShardedTensor, is in words; "" for other values.

    It looks at the names of the classes, whose import takes a while.
    """
    for kind in type(value).__mro__:
        is_torchs = kind.__module__.startswith("torch.distributed")
        if is_torchs and kind.__name__ in ("DTensor", "ShardedTensor"):
            mesh = getattr(value, "device_mesh", None)
            return f"a {kind.__name__}" + (f" on {mesh}" if mesh is not None else "")
    return ""


def check_not_divided(name: str, value: object) -> None:
    """Raise TypeError if ``value`` is a tensor of which torch gives each rank a part."""
    if divided := divided_by_torch(value):
        raise TypeError(
            f"{name} is {divided}. Give its full_tensor(), which is the same on all ranks of its "
            "mesh, and as process_group the ranks that have other values, if there are any."
        )


def check_flag(name: str, value: object, wanted: str = "True or False") -> None:
    """Raise TypeError unless ``value`` equals True or False, as 1 and 0 do."""
    try:
        is_flag = value in (False, True)
    except (RuntimeError, ValueError):  # a tensor or array of several numbers
        is_flag = False
    if not is_flag:
        raise TypeError(refusal(name, value, wanted))


def check_process_group(process_group: object) -> None:
    """Raise TypeError unless ``process_group`` is None or a group with this rank in it."""
    if isinstance(process_group, int) and process_group == dist.GroupMember.NON_GROUP_MEMBER:
        raise TypeError(
            "process_group is what new_group() returns on a rank that isn't one of the group's. "
            "Call this on the ranks of the group alone."
        )
    if process_group is not None and not callable(getattr(process_group, "allreduce", None)):
        wanted = "a process group, as torch.distributed.new_group() makes it, or None for all ranks"
        raise TypeError(refusal("process_group", process_group, wanted))


def _may_be_read(value: object) -> bool:
    """Whether ``value`` is no tensor, or one number.

    Else reading it raises RuntimeError, which from a device may also tell of an earlier kernel.
    """
    if not isinstance(value, torch.Tensor):
        return True
    return value.numel() == 1 and not value.is_complex() and not value.is_meta


def as_whole_number(
    name: str, value: object, wanted: str = "a whole number", at_least: int | None = None
) -> int:
    """``value`` as an int.

    Raises:
        TypeError: If it isn't an integer of Python, NumPy or torch, or is a bool.
        ValueError: If it is less than ``at_least``.
    """
    number = None
    if not isinstance(value, bool) and _may_be_read(value):
        with contextlib.suppress(TypeError):
            number = operator.index(value)  # type: ignore[arg-type]
    if number is None:
        raise TypeError(refusal(name, value, wanted))
    if at_least is not None and number < at_least:
        raise ValueError(refusal(name, value, wanted))
    return number


def as_number(name: str, value: object, wanted: str = "a number") -> float:
    """``value`` as a float, which may be NaN or infinite.

    Raises:
        TypeError: If it isn't a number or a tensor of one element.
    """
    number = None
    if not isinstance(value, str | bytes) and _may_be_read(value):
        try:
            number = float(value)  # type: ignore[arg-type]
        except OverflowError:
            number = math.inf
        except (TypeError, ValueError):
            pass
    if number is None:
        raise TypeError(refusal(name, value, wanted))
    return number


def as_finite_number(
    name: str, value: object, wanted: str = "a finite number", at_least: float = -math.inf
) -> float:
    """``value`` as a float.

    Raises:
        TypeError: If it isn't a number or a tensor of one element.
        ValueError: If it is NaN, infinite, or less than ``at_least``.
    """
    number = as_number(name, value, wanted)
    if not (math.isfinite(number) and number >= at_least):
        raise ValueError(refusal(name, value, wanted))
    return number


def as_device(name: str, value: object) -> torch.device:
    """``value`` as a device.

    Raises:
        TypeError: If it is neither a device nor the name or number of one.
        ValueError: If there is no such device in torch.
    """
    wanted = "a device, such as 'cpu' or 'cuda:0'"
    if isinstance(value, bool) or not isinstance(value, torch.device | str | int):
        raise TypeError(refusal(name, value, wanted))
    try:
        return torch.device(value)
    except (RuntimeError, ValueError) as error:
        raise ValueError(refusal(name, value, wanted)) from error


def only_device(
    module: nn.Module, device_ids: Sequence[Device] | None, output_device: Device | None
) -> torch.device | None:
    """Return the device that ``device_ids`` names, if it names one: that of ``module``.

    Raises:
        TypeError: If an argument is of a wrong type.
        ValueError: If one names another device than that of ``module``, or several.
    """
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
    accelerator = torch.accelerator.current_accelerator() or torch.device("cuda")
    device = as_device(argument, f"{accelerator.type}:{named}" if is_number else named)
    for other in devices:
        if other.type != device.type or device.index not in (None, other.index):
            raise ValueError(
                f"{name} names {device}, but the model is on {', '.join(map(str, devices))}. Leave "
                f"{name} out, or move the model there first."
            )
    return device
