"""Memory that several processes have: on the CPU as a segment, elsewhere by the device's handle.

What is defined here arrives in another process, when it is sent there, as the tensor that it is
about: the same memory and no copy.
"""

from __future__ import annotations

import math
import mmap
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import reduce_tensor

from lockstep.comm.shm.memory import Segment

_ALIGNMENT_BYTES = 64

Reduced = tuple[Callable[..., Any], tuple[Any, ...]]


class Place(NamedTuple):
    """Where in memory a tensor is.

    Attributes:
        dtype: Its dtype.
        start: Its first byte.
        shape: Its shape.
        stride: Its stride, in elements.
    """

    dtype: torch.dtype
    start: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def end(self) -> int:
        """The byte after its last one."""
        return self.start + math.prod(self.shape) * self.dtype.itemsize


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
    # In inference mode it would be of no use for training.
    with torch.inference_mode(False), torch.no_grad():
        for parameter, place in zip(parameters, places, strict=True):
            parameter.data = lone_tensor_at(mapped, place).copy_(parameter)
    return [SharedTensor(memory, place) for place in places]


def tensor_at(memory: torch.Tensor, place: Place) -> torch.Tensor:
    """The tensor that lies in ``memory``, which is bytes, at ``place``."""
    dtype, start, shape, stride = place
    empty = memory.new_empty(0, dtype=dtype)
    return empty.set_(memory.untyped_storage(), start // empty.element_size(), shape, stride)


def lone_tensor_at(memory: mmap.mmap | memoryview, place: Place) -> torch.Tensor:
    """The same in a buffer, with a storage of its own: who saves one doesn't save all."""
    dtype, start, shape, stride = place
    if not (numel := math.prod(shape)):
        return torch.empty(shape, dtype=dtype)
    flat = torch.frombuffer(memory, dtype=dtype, count=numel, offset=start)
    return flat.as_strided(shape, stride)


def places_for(tensors: Sequence[torch.Tensor]) -> tuple[list[Place], int]:
    """One behind the other, each in the order in memory that it has, if that has no gaps."""
    places: list[Place] = []
    num_bytes = 0
    for tensor in tensors:
        stride = torch.empty_like(tensor, device="meta").stride()
        places.append(Place(tensor.dtype, num_bytes, tuple(tensor.shape), stride))
        num_bytes = aligned(places[-1].end)
    return places, num_bytes


def aligned(num_bytes: int) -> int:
    """So many bytes, and those to the next place where a tensor may begin."""
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _itself(memory: torch.Tensor) -> torch.Tensor:
    return memory
