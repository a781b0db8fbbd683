"""The disguise: what ``torch.cuda`` does, by the simulated devices."""

from __future__ import annotations

import atexit
import contextlib
import os
import types
from typing import Any

import torch

from tests.simulated import module, nccl
from tests.simulated.control import device, index_of, set_delay

NAME = "Simulated GPU"


def install() -> None:
    """Make device type "cuda" the simulated one, in the torch that has just been imported."""
    import torch.cuda.nccl

    for name, value in _names_of_c().items():
        setattr(torch._C, name, value)
    for place, names in (
        (torch.cuda, module.names() | _devices() | _streams() | _memory() | _properties()),
        (torch.cuda.memory, _memory()),
        (torch.cuda.random, module.random()),
        (torch.cuda.streams, {"Stream": module.Stream, "Event": module.Event}),
        (torch.backends.cudnn, {"is_acceptable": lambda tensor: False}),
        (torch.cuda.nccl, {"version": lambda: (2, 0, 0), "is_available": lambda tensors: False}),
    ):
        for name, value in names.items():
            setattr(place, name, value)
    torch.UntypedStorage.clone = _clone
    nccl.install()
    set_delay(os.environ.get("SIM_DELAY", "0,0"))
    atexit.register(device.finish)


_clone_others = torch.UntypedStorage.clone


def _clone(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    if storage.device.type != "cuda":
        return _clone_others(storage)
    as_bytes = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return as_bytes.clone().untyped_storage()


def _names_of_c() -> dict[str, Any]:
    accelerator = torch.accelerator
    return {
        "_cuda_getDeviceCount": device.num_devices,
        "_cuda_getDevice": device.get_device,
        "_cuda_setDevice": device.set_device,
        "_cuda_exchangeDevice": module.exchange,
        "_cuda_maybeExchangeDevice": lambda index: module.exchange(index),
        "_cuda_isInBadFork": device.is_forked,
        "_cuda_synchronize": lambda: accelerator.synchronize(device.get_device()),
        "_cuda_hasPrimaryContext": lambda index: device.is_used(),
        "_cuda_isCurrentStreamCapturing": lambda: False,
        "_cuda_init": lambda: None,
        "_cuda_getCurrentRawStream": lambda index: accelerator.current_stream(index).stream_id,
        "_cuda_getArchFlags": lambda: "sm_90",
        "_scatter": _scatter,
        "_gather": _gather,
        "_broadcast_coalesced": lambda tensors, devices, size: [
            [_on(tensor, index) for tensor in tensors] for index in devices
        ],
        "_broadcast": lambda tensor, devices: [_on(tensor, index) for index in devices],
    }


def _on(tensor: torch.Tensor, index: int) -> torch.Tensor:
    return tensor if tensor.device.index == index else tensor.to(torch.device("cuda", index))


def _scatter(tensor: torch.Tensor, devices: Any, sizes: Any, dim: int, streams: Any) -> Any:
    parts = tensor.split(sizes, dim) if sizes else tensor.chunk(len(devices), dim)
    return [
        part.to(torch.device("cuda", index), non_blocking=True)
        for part, index in zip(parts, devices, strict=False)
    ]


def _gather(tensors: Any, dim: int, target: int | None) -> torch.Tensor:
    where = torch.device("cpu") if target in (None, -1) else torch.device("cuda", target)
    return torch.cat([tensor.to(where) for tensor in tensors], dim)


def _devices() -> dict[str, Any]:
    return {
        "_initialized": True,
        "_is_compiled": lambda: True,
        "_lazy_init": lambda: None,
        "_lazy_call": lambda function, **_: function(),
        "_exchange_device": module.exchange,
        "_maybe_exchange_device": lambda index: module.exchange(index),
        "init": lambda: None,
        "is_initialized": lambda: True,
    }


def _streams() -> dict[str, Any]:
    return {
        "default_stream": lambda given=None: torch.Stream(
            stream_id=0, device_index=index_of(given), device_type=1
        ),
        "set_stream": torch.accelerator.set_stream,
        "stream": lambda stream: contextlib.nullcontext() if stream is None else stream,
        "is_current_stream_capturing": lambda: False,
    }


def _memory() -> dict[str, Any]:
    def stats(given: Any = None) -> dict[str, int]:
        now, peak, total = device.memory(index_of(given))
        return {
            "allocated_bytes.all.current": now,
            "allocated_bytes.all.peak": peak,
            "allocated_bytes.all.allocated": total,
        }

    return {
        "memory_allocated": lambda given=None: device.memory(index_of(given))[0],
        "max_memory_allocated": lambda given=None: device.memory(index_of(given))[1],
        "reset_peak_memory_stats": lambda given=None: device.reset_peak(index_of(given)),
        "memory_stats": stats,
        "empty_cache": lambda: None,
        "ipc_collect": lambda: None,
    }


def _properties() -> dict[str, Any]:
    properties = types.SimpleNamespace(
        name=NAME, total_memory=1 << 36, major=9, minor=0, multi_processor_count=1
    )
    return {
        "get_device_properties": lambda given=None: properties,
        "get_device_name": lambda given=None: NAME,
        "get_device_capability": lambda given=None: (9, 0),
        "can_device_access_peer": lambda one, other: True,
        "is_bf16_supported": lambda *_, **__: True,
    }
