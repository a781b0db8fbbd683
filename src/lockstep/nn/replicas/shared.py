"""Memory that several processes have: on the CPU as a segment, elsewhere by the device's handle.

What is defined here arrives in another process, when it is sent there, as the tensor that it is
about: the same memory and no copy.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import reduce_tensor

from lockstep.comm.shm.memory import Segment
from lockstep.nn.replicas.wire import Place, places_for, tensor_at

Reduced = tuple[Callable[..., Any], tuple[Any, ...]]


class SharedMemory:
    """Memory on a device, which no more processes can get once this object is gone or closed.

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
            weakref.finalize(self, self.segment.close)
        else:
            self.here = torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def close(self) -> None:
        """All processes have it that are to."""
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


def share(parameters: Sequence[torch.Tensor]) -> list[object]:
    """What arrives as ``parameters``, which are all on one device; those on the CPU are moved."""
    if not all(parameter.device.type == "cpu" for parameter in parameters):
        return [TensorByHandle(parameter) for parameter in parameters]
    places, num_bytes = places_for(parameters)
    memory = SharedMemory(num_bytes, torch.device("cpu"))
    assert memory.segment is not None
    mapped = mmap.mmap(memory.segment.descriptor, max(num_bytes, 1))
    with torch.no_grad():
        for parameter, (dtype, start, shape, stride) in zip(parameters, places, strict=True):
            if not parameter.numel():
                continue
            # Each with a storage of its own: who saves one doesn't save all.
            flat = torch.frombuffer(mapped, dtype=dtype, count=parameter.numel(), offset=start)
            parameter.data = flat.as_strided(shape, stride).copy_(parameter)
    return [SharedTensor(memory, place) for place in places]


def _itself(memory: torch.Tensor) -> torch.Tensor:
    return memory
