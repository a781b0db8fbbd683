"""The accelerator of this machine: a GPU of CUDA, or one of another kind that torch knows of."""

from __future__ import annotations

import pytest
import torch

_found = torch.accelerator.current_accelerator(check_available=True)
# Where there is none, the tests are skipped, and only their names have it.
KIND = "cuda" if _found is None else _found.type
NUM_DEVICES = 0 if _found is None else torch.accelerator.device_count()
GPU = torch.device(KIND, 0)
# What torch has for CUDA alone, or Gloo carries.
IS_CUDA = KIND == "cuda"

NEEDED = [
    pytest.mark.skipif(_found is None, reason="needs a GPU"),
    pytest.mark.skipif(KIND == "mps", reason="computes in float64, which MPS doesn't have"),
]
ONLY_CUDA = pytest.mark.skipif(not IS_CUDA, reason="torch has it for CUDA alone")


def current_stream() -> torch.Stream:
    """Return the stream on which the first device works now."""
    return torch.accelerator.current_stream(GPU)


def sleep(x: torch.Tensor) -> None:
    """Keep the current stream of the device of ``x``, unless that is the CPU, for some time."""
    if x.device.type == "cpu":
        return
    module = torch.get_device_module(x.device)
    if hasattr(module, "_sleep"):
        module._sleep(20_000_000)  # cycles
    else:
        work = torch.ones(2048, 2048, device=x.device)
        for _ in range(20):
            work = work @ work / 2048
