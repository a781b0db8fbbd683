"""Memory that several processes have: on the CPU as a segment, elsewhere by the device's handle.

What is defined here arrives in another process, when it is sent there, as the tensor that it is
about: the same memory and no copy.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import reduce_tensor

from lockstep.comm.shm.memory import Segment
from lockstep.nn.replicas.wire import Place, places_for, tensor_at

Reduced = tuple[Callable[..., Any], tuple[Any, ...]]


class SharedMemory:
    """Memory on a device.

    Attributes:
        here: It, as bytes.

    Args:
        num_bytes: How much.
        device: Where.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.segment: Segment | None = None
        if device.type == "cpu":
            self.segment, self.here = Segment.create(num_bytes)
        else:
            self.here = torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def close(self) -> None:
        """No more processes are to have it."""
        if self.segment is not None:
            self.segment.close()

    def __reduce__(self) -> Reduced:
        if self.segment is None:
            reduced: Reduced = reduce_tensor(self.here)
            return reduced
        return _itself, (self.segment,)


class SharedTensor:
    """A tensor in such memory, and where it is there."""

    def __init__(self, memory: SharedMemory, place: Place) -> None:
        self._memory, self._place = memory, place

    def __reduce__(self) -> Reduced:
        return tensor_at, (self._memory, self._place)


class TensorByHandle:
    """A tensor of an accelerator, wherever its memory is."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __reduce__(self) -> Reduced:
        reduced: Reduced = reduce_tensor(self._tensor.detach())
        return reduced


def share(tensors: Sequence[torch.Tensor]) -> tuple[list[object], SharedMemory | None]:
    """What arrives as ``tensors``; those on the CPU are moved, to memory that is still to close."""
    if not all(tensor.device.type == "cpu" for tensor in tensors):
        return [TensorByHandle(tensor) for tensor in tensors], None
    places, num_bytes = places_for(tensors)
    memory = SharedMemory(num_bytes, torch.device("cpu"))
    assert memory.segment is not None
    mapped = mmap.mmap(memory.segment.descriptor, max(num_bytes, 1))
    with torch.no_grad():
        for tensor, (dtype, start, shape, stride) in zip(tensors, places, strict=True):
            if not tensor.numel():
                continue
            # Each with a storage of its own: who saves one doesn't save all.
            flat = torch.frombuffer(mapped, dtype=dtype, count=tensor.numel(), offset=start)
            tensor.data = flat.as_strided(shape, stride).copy_(tensor)
    return [SharedTensor(memory, place) for place in places], memory


def _itself(memory: torch.Tensor) -> torch.Tensor:
    return memory
