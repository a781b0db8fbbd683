"""Numbers that devices compute in a step, and that the host reads at once, at its end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from lockstep.nn import Number


def read(numbers: Sequence[Number]) -> list[float]:
    """Return ``numbers`` as the host has them, for which it waits once for each device.

    Those on devices are of float64 or int64.
    """
    places: dict[torch.device, list[int]] = defaultdict(list)
    result = [0.0 if isinstance(each, torch.Tensor) else each for each in numbers]
    for at, each in enumerate(numbers):
        if isinstance(each, torch.Tensor):
            places[each.device].append(at)
    for its in places.values():
        found = [each for at in its if isinstance(each := numbers[at], torch.Tensor)]
        # As integers, of which all bits stay.
        bits = torch.stack([each.detach().view(torch.int64) for each in found]).cpu()
        for at, one, each in zip(its, bits, found, strict=True):
            result[at] = one.view(each.dtype).item()
    return result


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of ``tensor``, as a tensor of one dimension."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def has_other_bits(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return whether the two, of one form, differ in any bit, as an integer on their device."""
    return (bytes_of(one) != bytes_of(other)).any().to(torch.int64)


def digest_on_device(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return an integer on their device that ``tensors`` of the same bits have in common."""
    flat = torch.cat([bytes_of(each) for each in tensors])
    words = F.pad(flat, (0, -len(flat) % 8)).view(torch.int64)
    # Each is multiplied by an odd number of its own, before which a sign comes to other bits: the
    # products of two signs that differ would make up for each other.
    words = words ^ (words >> 31)
    odd = torch.arange(1, 2 * len(words), 2, device=words.device)
    return (words * odd).sum()
