"""Backends of torch.distributed and of others, by the kinds of devices whose tensors they carry."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist

from lockstep.comm.failures import STORE_SECONDS, answered
from lockstep.errors import BackendUnavailable
from lockstep.torch_private import _DistributedBackendOptions


def carries(backend: str, kind: str) -> bool:
    """Whether a backend, of torch or registered with it, carries tensors of a kind of device."""
    return kind in dist.Backend.backend_capability.get(backend.lower(), [kind])


def carrier(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """The name of the backend with which ``group`` carries tensors on ``device``, if it does."""
    if hasattr(group, "empty"):  # one of ours
        others: dict[str, str] = group._backends()  # type: ignore[attr-defined]
        name = group.name() if device.type == "cpu" else others.get(device.type)
        return name if name is not None and carries(name, device.type) else None
    try:
        name = group._get_backend(torch.device(device.type)).name()
    except RuntimeError:
        return None
    return name if carries(name, device.type) else None


def backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """The name of the backend for tensors on ``device``, or else of the group."""
    # torch calls a group of several backends "undefined" if NCCL isn't one of them.
    return carrier(group, device) or group.name()


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """How long calls of ``group`` wait for other ranks; its store does if no backend tells."""
    if (queue := getattr(group, "_queue", None)) is not None:  # one of ours
        return cast(timedelta, queue.timeout)
    for device in group._device_types:
        with contextlib.suppress(AttributeError, RuntimeError):  # backends need no options
            return cast(timedelta, cast(Any, group._get_backend(device)).options._timeout)
    return cast(timedelta, cast(Any, group.get_group_store()).timeout)


def connect(
    backend: str, kind: str, store: dist.Store, rank: int, size: int, timeout: timedelta
) -> Any:
    """Connect to the other ranks by ``backend``, for tensors on devices of a ``kind``.

    Raises:
        BackendUnavailable: If torch has no such backend, or it carries no such tensors.
    """
    plugin = dist.Backend._plugins.get(backend.upper())
    torchs: Any = getattr(dist, f"ProcessGroup{backend.upper()}", None)  # NCCL's, or XPU's XCCL
    if not carries(backend, kind) or (plugin is None and not hasattr(torchs, "Options")):
        raise BackendUnavailable(
            f"The backend {backend!r} can't be used for tensors of {kind}: it carries none, or "
            "torch doesn't have it here. Give the group another one for them."
        )
    if backend == "gloo":
        create = partial(dist.ProcessGroupGloo, store, rank, size, timeout=timeout)
        return answered(create, timeout.total_seconds() + STORE_SECONDS)
    if plugin is None:
        options = torchs.Options()
        options._timeout = timeout
        return torchs(store, rank, size, options)
    if not plugin.extended_api:
        return plugin.creator_fn(store, rank, size, timeout)
    options = _DistributedBackendOptions()
    options.store, options.timeout = store, timeout
    options.group_rank, options.group_size = rank, size
    options.global_ranks_in_group = [*range(size)]
    return plugin.creator_fn(options, None)
