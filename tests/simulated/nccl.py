"""The disguise of torch.distributed: NCCL over simulated devices, and Gloo for their tensors."""

from __future__ import annotations

import secrets
import socket
import sys
import types
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

device: Any = sys.modules.get("_simulated")
_RealGloo = dist.ProcessGroupGloo
_TIMEOUT = timedelta(minutes=10)


def install() -> None:
    device.add_classes()
    distributed_c10d._NCCL_AVAILABLE = True
    distributed_c10d.ProcessGroupNCCL = dist.ProcessGroupNCCL = NCCL
    distributed_c10d.ProcessGroupGloo = dist.ProcessGroupGloo = Gloo


class _OfBackends(type):
    """Lets ``isinstance`` know which of our backends have the class's name."""

    def __instancecheck__(cls, instance: Any) -> bool:
        if isinstance(instance, device.Backend):
            return instance.name().lower() == cls.__name__.lower()
        return cls is Gloo and isinstance(instance, _RealGloo)


class NCCL(metaclass=_OfBackends):
    class Options:
        def __init__(self, *_: Any, **__: Any) -> None:
            self.backend, self.group_name = "nccl", ""
            self._timeout = _TIMEOUT
            self.is_high_priority_stream = False
            self.config = types.SimpleNamespace()
            self.global_ranks_in_group: list[int] = []
            self.split_from = self.split_color = None

    def __new__(cls, store: dist.Store, rank: int, size: int, options: Any = None, **_: Any) -> Any:
        options = options or cls.Options()
        check_one_device_each(store, rank, size)
        return connect("nccl", store, rank, size, options._timeout)


def check_one_device_each(store: dist.Store, rank: int, size: int) -> None:
    local = f"{socket.gethostname()}/{device.get_device()}"
    store.set(f"device/{rank}", local)
    every = [store.get(f"device/{other}").decode() for other in range(size)]
    if len(set(every)) < size:
        raise RuntimeError(f"NCCL error: Duplicate GPU detected : {', '.join(every)}")


class Gloo(metaclass=_OfBackends):
    Options = getattr(_RealGloo, "Options", None)
    _Options = getattr(_RealGloo, "_Options", None)
    create_default_device = getattr(_RealGloo, "create_default_device", None)

    def __new__(cls, store: dist.Store, rank: int, size: int, timeout: Any = _TIMEOUT) -> Any:
        return connect("gloo", store, rank, size, timeout)


def connect(name: str, store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    def create(number: int) -> Any:
        return _RealGloo(dist.PrefixStore(f"gloo/{number}", store), rank, size, timeout)

    # Which communicator it is, for all of its ranks.
    if rank == 0:
        store.set("communicator", str(1 + secrets.randbits(60)))
    identity = int(store.get("communicator"))
    return device.make_backend(name, identity, store, create(-1), create)
