"""The disguise of an accelerator that torch doesn't know: it registers itself as "sim".

Torch has a device type for those, PrivateUse1, which NPUs take too. ``torch.sim`` has little more
than torch asks of such a module, so that what is right for CUDA alone is found. Its collectives are
those of a backend of its own, "simccl", and Gloo doesn't carry its tensors.
"""

from __future__ import annotations

import atexit
import os
import types
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tests.simulated import module, nccl
from tests.simulated.control import BACKEND, KIND, device, index_of, set_delay


def install() -> None:
    """Let the torch that has just been imported know of the devices."""
    torch.utils.rename_privateuse1_backend(KIND)
    faces: Any = types.ModuleType(f"torch.{KIND}")
    vars(faces).update(module.names())
    faces.device = lambda given: torch.accelerator.device_index(index_of(given))
    faces._is_in_bad_fork = device.is_forked
    faces.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    torch._register_device_module(KIND, faces)
    torch.utils.generate_methods_for_privateuse1_backend()
    device.add_classes()
    dist.Backend.register_backend(BACKEND, _connect, devices=[KIND])
    set_delay(os.environ.get("SIM_DELAY", "0,0"))
    atexit.register(device.finish)


def _connect(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    nccl.check_one_device_each(store, rank, size)
    return nccl.connect(BACKEND, store, rank, size, timeout)
