"""Batches for batch normalization over ranks."""

from __future__ import annotations

import torch

CHANNELS = 3


def batches(shape: tuple[int, ...], sizes: list[int], count: int = 2) -> list[list[torch.Tensor]]:
    """Some whole batches, each as its parts."""
    generator = torch.Generator().manual_seed(0)
    wholes = [
        3 + 2 * torch.randn(sum(sizes), CHANNELS, *shape, dtype=torch.float64, generator=generator)
        for _ in range(count)
    ]
    return [list(whole.split(sizes)) for whole in wholes]
