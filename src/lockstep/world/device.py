"""Which device a rank computes on, and which backend carries its tensors."""

from __future__ import annotations

import sys

import torch

from lockstep.comm.backends import SHM

GLOO = "gloo"
NCCL_AND_GLOO = "cpu:gloo,cuda:nccl"


def choose_device(
    local_rank: int, local_world_size: int, num_devices: int, one_device_per_task: bool
) -> torch.device:
    """A GPU of its own for each rank of the host, or the CPU for all of them."""
    if one_device_per_task and num_devices == 1:
        return torch.device("cuda", 0)
    if num_devices >= local_world_size:
        return torch.device("cuda", local_rank)
    return torch.device("cpu")


def choose_backend(device: torch.device) -> str:
    """NCCL for tensors on a GPU and Gloo for those on the CPU, which every model has some of.

    Without GPUs, ranks of one host share memory, where the system lets them: on Linux.
    """
    if device.type == "cuda":
        return NCCL_AND_GLOO
    return SHM if sys.platform == "linux" else GLOO
