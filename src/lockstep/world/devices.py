"""Where ranks compute: accelerators, and the backends that carry their tensors to other ranks.

What kind of accelerator there is, torch says: CUDA and ROCm (both are "cuda"), XPU, MPS, and what
registers itself with torch, as NPUs do (PrivateUse1).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from lockstep.comm import SHM, carries
from lockstep.errors import BackendUnavailable
from lockstep.world.environment import Placement

_log = logging.getLogger("lockstep")
_CPU = torch.device("cpu")


def accelerator() -> str | None:
    """The kind of accelerator that torch can use here, such as "cuda"; None if there is none."""
    device = torch.accelerator.current_accelerator(check_available=True)
    return device.type if device is not None and torch.accelerator.device_count() else None


def num_accelerators() -> int:
    """How many accelerators torch can use here."""
    return torch.accelerator.device_count() if accelerator() is not None else 0


def backend_of(kind: str) -> str | None:
    """The backend of torch.distributed for tensors on devices of this kind; None if there is none.

    Torch names one for MPS that doesn't carry its tensors.
    """
    try:
        name = dist.get_default_backend_for_device(kind)
    except ValueError:
        return None
    return name if carries(name, kind) else None


def is_capturing() -> bool:
    """Whether a graph of the accelerator's work is captured, as a CUDA graph is.

    Nothing may be read then, and events can't be asked.
    """
    if (kind := accelerator()) is None:
        return False
    return bool(getattr(torch.get_device_module(kind), "is_current_stream_capturing", bool)())


def seed_accelerators(seed: int) -> None:
    """Seed torch's generators of all accelerators, if anything can have drawn from them."""
    if (kind := accelerator()) is not None:
        module: Any = torch.get_device_module(kind)
        if getattr(module, "is_initialized", lambda: True)():
            getattr(module, "manual_seed_all", module.manual_seed)(seed)


@functools.cache
def _has_float64(kind: str) -> bool:
    """Whether devices of this ``kind`` compute in float64: not MPS, nor some of XPU."""
    if kind in ("cpu", "cuda", "meta"):
        return True
    if accelerator() == kind:
        torch.accelerator.synchronize()  # which raises what an earlier kernel has met with
    try:
        (torch.ones(1, dtype=torch.float64, device=kind) + 1).item()
    except (RuntimeError, TypeError):
        return False
    return True


def device_of_sums(device: torch.device) -> torch.device:
    """The device for sums in float64 of what is on ``device``: the CPU if that has no float64."""
    return device if _has_float64(device.type) else _CPU


def choose_backend(device: torch.device) -> str:
    """That of an accelerator for its tensors, and Gloo for those on the CPU: models have some.

    On the CPU, ranks of one host share memory.
    """
    name = backend_of(device.type) if device.type != "cpu" else None
    return f"cpu:gloo,{device.type}:{name}" if name is not None else SHM


def choose_device(
    local_rank: int,
    local_world_size: int,
    num_devices: int,
    one_device_per_task: bool,
    kind: str = "cuda",
) -> torch.device:
    """An accelerator of its own for each rank of the host, or the CPU for all of them."""
    if one_device_per_task and num_devices == 1:
        return torch.device(kind, 0)
    if num_devices >= local_world_size:
        return torch.device(kind, local_rank)
    return _CPU


def usable_device(
    place: Placement,
    local: tuple[int, int],
    wanted: torch.device | None,
    backend: str | None = None,
) -> torch.device:
    """Return the device of this rank, by default one that :func:`choose_device` chooses.

    ``local`` are the local rank and world size. Without an index, an accelerator is that of the
    local rank, if each rank of the host can have its own. ``backend`` is that of the group, if the
    program has chosen it.

    Raises:
        BackendUnavailable: If the device that is wanted isn't there, or no backend carries its
            tensors to other ranks.
    """
    kind, number = accelerator(), num_accelerators()
    local_rank, local_size = local

    def lacks_backend(kind: str) -> bool:
        return place.world_size > 1 and backend is None and backend_of(kind) is None

    if wanted is None:
        if kind is None:
            return _CPU
        if lacks_backend(kind):
            if place.rank == 0:
                _log.warning("Ranks compute on the CPU: %s.", _no_backend(kind))
            return _CPU
        device = choose_device(local_rank, local_size, number, place.one_device_per_task, kind)
        if device == _CPU and local_rank == 0:
            _log.warning(
                "Ranks compute on the CPU: this host has %s for %d ranks. Start %d of them to give "
                "each a device of its own, or give init(device=...) to share one.",
                *(_counted(number, kind), local_size, number),
            )
        return device
    if wanted.type in ("cpu", "meta"):
        return wanted
    asked = f"init(device={str(wanted)!r}) was asked for, but"
    if wanted.type != kind or (wanted.index or 0) >= number:
        raise BackendUnavailable(
            f"{asked} torch can use {_counted(number, kind)} here. Leave 'device' out to let "
            "lockstep choose."
        )
    if lacks_backend(kind):
        raise BackendUnavailable(
            f"{asked} {_no_backend(kind)}. Import the package that brings it, if there is one, or "
            "leave 'device' out."
        )
    if wanted.index is None:
        chosen = choose_device(local_rank, local_size, number, place.one_device_per_task, kind)
        if chosen == _CPU:  # ranks share what is current
            return torch.device(kind, torch.accelerator.current_device_index())
        return chosen
    return wanted


def _counted(number: int, kind: str | None) -> str:
    if kind is None:
        return "no accelerator"
    return f"{number} {kind} device{'s' if number != 1 else ''}"


def _no_backend(kind: str) -> str:
    return f"no backend of torch.distributed carries tensors of {kind} between ranks"


def carriers(backend: str) -> dict[str, str]:
    """The backend that carries tensors, by their kind of device, in a group of ``backend``."""
    return dict(dist.BackendConfig(dist.Backend(backend)).get_device_backend_map())


def carried_device(device: torch.device, backend: str | None, *, is_chosen: bool) -> torch.device:
    """Return ``device``, or the CPU if ``backend`` doesn't carry its tensors and it ``is_chosen``.

    Raises:
        BackendUnavailable: If the program has asked for both, or the backend isn't for the CPU.
    """
    if backend is None or device.type == "meta":
        return device
    kinds = [kind for kind, name in carriers(backend).items() if carries(name, kind)]
    if device.type in kinds:
        return device
    if is_chosen and "cpu" in kinds:
        _log.warning(
            "Ranks compute on the CPU: the backend %r carries no tensors of %s.",
            *(backend, device.type),
        )
        return _CPU
    raise BackendUnavailable(
        f"The backend {backend!r} carries tensors of {' and '.join(sorted(kinds)) or 'no device'} "
        f"between ranks, and this rank's device is {device}. Give init() another device, leave "
        f"'backend' out to let lockstep choose, or give backend={choose_backend(device)!r}."
    )


def make_current(device: torch.device) -> None:
    """Make an accelerator the one on which tensors are made that name none."""
    if device.type not in ("cpu", "meta") and device.index is not None:
        torch.accelerator.set_device_index(device.index)


def one_kind(devices: Sequence[str], chosen: Sequence[bool]) -> str | None:
    """Return the kind of all ranks' devices, or None if they have to take the CPU.

    Args:
        devices: The kind of each rank's device.
        chosen: Of each, whether lockstep chose it.

    Raises:
        BackendUnavailable: If ranks were given devices of different kinds.
    """
    if len({*devices}) == 1:
        return devices[0]
    if all(chosen):
        return None
    kinds = {kind: devices.index(kind) for kind in devices}
    named = " and ".join(f"{kind} on rank {rank}" for kind, rank in kinds.items())
    raise BackendUnavailable(
        f"The ranks' devices are of different kinds, {named}, which share no default backend. Give "
        "init() devices of one kind on all ranks, or backend='gloo'."
    )
