"""Which device a rank computes on, and which backend carries its tensors."""

from __future__ import annotations

import torch

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
    """NCCL for tensors on a GPU and Gloo for those on the CPU, which every model has some of."""
    return NCCL_AND_GLOO if device.type == "cuda" else "gloo"
