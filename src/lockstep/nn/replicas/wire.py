"""Values that go from one process to another, their tensors through memory that both see."""

from __future__ import annotations

import io
import math
import pickle
import socket
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import cloudpickle
import torch
from torch.multiprocessing.reductions import reduce_tensor

from lockstep.comm.shm.lines import receive_message, send_message, shut_down
from lockstep.comm.shm.memory import Segment, map_segment

# How long the message is, and whether the first descriptor is that of the sender's memory.
_HEADER = struct.Struct("<Q?")
_MOST_DESCRIPTORS = 8
_ALIGNMENT_BYTES = 64


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


class Wire:
    """One end of a line between two processes.

    What is sent is pickled, but for its tensors: those on the CPU are copied to memory of the
    sender that the receiver has mapped, and from there; those of an accelerator stay there. A
    :class:`~lockstep.comm.shm.memory.Segment` arrives as the tensor of its bytes.

    Args:
        line: A connected stream socket.
        devices: Where tensors are that both ends have.
    """

    def __init__(self, line: socket.socket, devices: Iterable[torch.device] = ()) -> None:
        accelerator = torch.accelerator.current_accelerator()
        kind = None if accelerator is None else accelerator.type
        self._devices = {device for device in devices if device.type == kind}
        self._line = line
        self._mine = torch.empty(0, dtype=torch.uint8)
        self._theirs = torch.empty(0, dtype=torch.uint8)

    def close(self) -> None:
        """End the line, also for whoever else has it open."""
        shut_down(self._line)
        self._line.close()

    def send(self, value: object) -> None:
        """Send ``value``, which can be pickled.

        Raises:
            OSError: If the other end is gone.
            Exception: What pickling raises; then nothing was sent.
        """
        self.send_packed(Packed(value))

    def send_packed(self, packed: Packed) -> None:
        """Send what is packed already."""
        for device in self._devices:
            torch.accelerator.synchronize(device)  # the other end has other streams
        places, num_bytes = places_for(packed.tensors)
        segment, memory = None, self._mine
        if num_bytes > len(memory):
            segment, memory = Segment.create(2 * num_bytes)
        for tensor, place in zip(packed.tensors, places, strict=True):
            tensor_at(memory, place).copy_(tensor.detach())
        message = pickle.dumps((places, packed.payload))
        mine = [] if segment is None else [segment]
        descriptors = [own.descriptor for own in (*mine, *packed.segments)]
        send_message(self._line, _HEADER.pack(len(message), bool(mine)), descriptors)
        self._mine = memory
        if segment is not None:
            segment.close()
        self._line.sendall(message)

    def receive(self, known: Sequence[torch.Tensor] = ()) -> Any:
        """Return what was sent.

        Args:
            known: What the other end may refer to, by index.

        Raises:
            EOFError: If the other end is gone.
        """
        header, descriptors = receive_message(self._line, _HEADER.size, _MOST_DESCRIPTORS)
        if len(header) < _HEADER.size:
            raise EOFError
        memory = [map_segment(descriptor) for descriptor in descriptors]
        length, has_theirs = _HEADER.unpack(header)
        if has_theirs:
            self._theirs = memory.pop(0)
        places, payload = pickle.loads(self._read(length))
        tensors = [tensor_at(self._theirs, place) for place in places]
        return _Unpickler(io.BytesIO(payload), tensors, memory, known).load()

    def _read(self, length: int) -> bytes:
        parts = []
        while length:
            part = self._line.recv(min(length, 1 << 20))
            if not part:
                raise EOFError
            parts.append(part)
            length -= len(part)
        return b"".join(parts)


class Packed:
    """A value that is ready to be sent.

    Attributes:
        payload: It, pickled, without its tensors and segments.
        tensors: Those on the CPU.
        segments: These.

    Args:
        value: It.
        known: By the ``id()`` of a tensor, which of those it is that the other end knows.

    Raises:
        Exception: What pickling raises.
    """

    def __init__(self, value: object, known: Mapping[int, int] | None = None) -> None:
        file = io.BytesIO()
        pickler = _Pickler(file, known or {})
        pickler.dump(value)
        self.payload = file.getvalue()
        self.tensors, self.segments = pickler.tensors, pickler.segments


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Leaves out tensors and segments, and remembers them."""

    def __init__(self, file: io.BytesIO, known: Mapping[int, int]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[torch.Tensor] = []
        self.segments: list[Segment] = []
        self._known = known

    def persistent_id(self, value: object) -> tuple[str, object] | None:
        if isinstance(value, Segment):
            if value not in self.segments:
                self.segments.append(value)
            return "memory", self.segments.index(value)
        if not isinstance(value, torch.Tensor):
            return None
        if id(value) in self._known:
            return "known", self._known[id(value)]
        if value.layout is not torch.strided:
            return None
        if value.device.type != "cpu":
            # What came from another process can't be sent on: only what this one has allocated.
            return "elsewhere", reduce_tensor(value.detach().clone())
        self.tensors.append(value)
        return "here", len(self.tensors) - 1


class _Unpickler(pickle.Unpickler):
    """Puts them in again."""

    def __init__(
        self,
        file: io.BytesIO,
        here: Sequence[torch.Tensor],
        memory: Sequence[torch.Tensor],
        known: Sequence[torch.Tensor],
    ) -> None:
        super().__init__(file)
        self._here, self._memory, self._known = here, memory, known

    def persistent_load(self, key: tuple[str, Any]) -> torch.Tensor:
        kind, what = key
        if kind == "elsewhere":
            rebuild, arguments = what
            tensor: torch.Tensor = rebuild(*arguments)
        else:
            tensor = {"here": self._here, "memory": self._memory, "known": self._known}[kind][what]
        # Where the sender has put it, it will put the next one.
        return tensor.clone() if kind in ("here", "elsewhere") else tensor


def tensor_at(memory: torch.Tensor, place: Place) -> torch.Tensor:
    """The tensor that lies in ``memory``, which is bytes, at ``place``."""
    dtype, start, shape, stride = place
    empty = memory.new_empty(0, dtype=dtype)
    return empty.set_(memory.untyped_storage(), start // empty.element_size(), shape, stride)


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
