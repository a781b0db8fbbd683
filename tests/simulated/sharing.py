"""Memory of simulated devices in several processes: what CUDA's handles between processes do."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from torch.multiprocessing import reductions

device: Any = sys.modules.get("_simulated")
_reduce_others = reductions.reduce_tensor
_clone_others = torch.UntypedStorage.clone


def install() -> None:
    # Pickling takes it from a table that the module's import has filled.
    for kind in (torch.Tensor, torch.nn.Parameter):
        reductions.reduction.register(kind, reduce_tensor)
    reductions.reduce_tensor = reduce_tensor
    torch.UntypedStorage.clone = _clone


def as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _clone(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    if storage.device.type != "cuda":
        return _clone_others(storage)
    return as_bytes(storage).clone().untyped_storage()


def reduce_tensor(tensor: torch.Tensor) -> tuple:
    if tensor.device.type != "cuda":
        return _reduce_others(tensor)
    if tensor.requires_grad and not tensor.is_leaf:
        raise RuntimeError("Cowardly refusing to serialize non-leaf tensor which requires_grad")
    # Work on it has to be done before another process looks: CUDA sends an event for that.
    torch.cuda.synchronize(tensor.device)
    layout = (tensor.size(), tensor.stride(), tensor.storage_offset(), tensor.dtype)
    handle = (tensor.device.index, *device.share(as_bytes(tensor.untyped_storage())))
    return _rebuild, (type(tensor), layout, handle, tensor.requires_grad)


def _rebuild(kind: type, layout: tuple, handle: tuple, requires_grad: bool) -> torch.Tensor:
    size, stride, offset, dtype = layout
    index, process, *place = handle
    if process == os.getpid():
        raise RuntimeError("a handle of CUDA can't be opened in the process that has made it")
    storage = device.map_shared(index, process, *place).untyped_storage()
    tensor = torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, size, stride)
    if kind is torch.nn.Parameter:
        return torch.nn.Parameter(tensor, requires_grad=requires_grad)
    return tensor.requires_grad_(requires_grad)
