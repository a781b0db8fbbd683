"""Which device an argument means, and how a tensor gets there."""

from __future__ import annotations

import torch

from lockstep.nn.arguments import Device


def as_device(device: Device) -> torch.device:
    """What ``device`` names: an int is an accelerator's index, and -1 the CPU, as in torch.

    Raises:
        ValueError: If it is the index of an accelerator that isn't there.
    """
    if not isinstance(device, int):
        named = torch.device(device)
        # As tensors there say: the CPU has no index, and others have one.
        return torch.device("cpu") if named.type == "cpu" else torch.empty(0, device=named).device
    if device == -1:
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    count = torch.accelerator.device_count() if accelerator else 0
    if accelerator is None or not 0 <= device < count:
        raise ValueError(
            f"Device {device} is to be an accelerator's index, but there are {count} here. Name "
            "another device, such as 'cpu'."
        )
    return torch.device(accelerator.type, device)


def move(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``tensor`` on ``device``: itself if it is there, else a copy that gradients come back from.

    What is to arrive on a CPU is waited for: the program would read it before it has come.
    """
    return tensor.to(device, non_blocking=device.type != "cpu")
