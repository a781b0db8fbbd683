"""Memory that several processes have: on the CPU as a segment, elsewhere by the device's handle.

What is defined here arrives in another process, when it is sent there, as the tensor that it is
about: the same memory and no copy.
"""

from __future__ import annotations

import functools
import math
import mmap
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import reduce_tensor

from lockstep.comm import Segment

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


class SharedTensors:
    """Tensors in such memory, which arrive as a list.

    Args:
        like: What has their shapes, strides and dtypes.
        device: Where they are.
    """

    def __init__(self, like: Sequence[torch.Tensor], device: torch.device) -> None:
        self._places, num_bytes = places_for(like)
        self._memory = SharedMemory(num_bytes, device)

    def close(self) -> None:
        """All processes have them that are to."""
        self._memory.close()

    @functools.cached_property
    def here(self) -> list[torch.Tensor]:
        """They, all in one storage."""
        return _tensors_at(self._memory.here, self._places)

    def alone(self) -> list[torch.Tensor]:
        """They, on the CPU, each with a storage of its own: who saves one doesn't save all."""
        assert self._memory.segment is not None
        mapped = mmap.mmap(self._memory.segment.descriptor, max(len(self._memory.here), 1))
        return [_lone_tensor_at(mapped, place) for place in self._places]

    def __reduce__(self) -> Reduced:
        return _tensors_at, (self._memory, self._places)


class TensorByHandle:
    """A tensor of an accelerator, wherever its memory is."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __reduce__(self) -> Reduced:
        reduced: Reduced = reduce_tensor(self._tensor.detach())
        return reduced


def share(parameters: Sequence[torch.Tensor]) -> object:
    """What arrives as a list of ``parameters``, which are on one device; on the CPU they move."""
    if not all(parameter.device.type == "cpu" for parameter in parameters):
        return [TensorByHandle(parameter) for parameter in parameters]
    shared = SharedTensors(parameters, torch.device("cpu"))
    # In inference mode it would be of no use for training.
    with torch.inference_mode(False), torch.no_grad():
        for parameter, there in zip(parameters, shared.alone(), strict=True):
            parameter.data = there.copy_(parameter)
    return shared


def tensor_at(memory: torch.Tensor, place: Place) -> torch.Tensor:
    """The tensor that lies in ``memory``, which is bytes, at ``place``."""
    dtype, start, shape, stride = place
    empty = memory.new_empty(0, dtype=dtype)
    return empty.set_(memory.untyped_storage(), start // empty.element_size(), shape, stride)


def _tensors_at(memory: torch.Tensor, places: Sequence[Place]) -> list[torch.Tensor]:
    return [tensor_at(memory, place) for place in places]


def _lone_tensor_at(memory: mmap.mmap, place: Place) -> torch.Tensor:
    if not (numel := math.prod(place.shape)):
        return torch.empty(place.shape, dtype=place.dtype)
    flat = torch.frombuffer(memory, dtype=place.dtype, count=numel, offset=place.start)
    return flat.as_strided(place.shape, place.stride)


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
