"""Values that go from one process to another, their tensors through memory that both see."""

from __future__ import annotations

import io
import math
import pickle
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import cloudpickle
import torch

from lockstep.comm.shm.lines import receive_message, send_message, shut_down
from lockstep.comm.shm.memory import Segment, map_segment

# How long the message is.
_HEADER = struct.Struct("<Q")
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

    What is sent is pickled, but for its tensors: these are copied to memory of the sender that the
    receiver has mapped, and from there.

    Args:
        line: A connected stream socket.
    """

    def __init__(self, line: socket.socket) -> None:
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
        places, num_bytes = places_for(packed.tensors)
        segment, memory = None, self._mine
        if num_bytes > len(memory):
            segment, memory = Segment.create(2 * num_bytes)
        for tensor, place in zip(packed.tensors, places, strict=True):
            tensor_at(memory, place).copy_(tensor.detach())
        message = pickle.dumps((places, packed.payload))
        descriptors = [] if segment is None else [segment.descriptor]
        send_message(self._line, _HEADER.pack(len(message)), descriptors)
        self._mine = memory
        if segment is not None:
            segment.close()
        self._line.sendall(message)

    def send_memory(self, segment: Segment) -> None:
        """Let the other end map ``segment``, which it does with :meth:`receive_memory`."""
        send_message(self._line, _HEADER.pack(0), [segment.descriptor])

    def receive_memory(self) -> torch.Tensor:
        """Map what the other end has sent, and return it as bytes."""
        _, (descriptor,) = receive_message(self._line, _HEADER.size, 1)
        return map_segment(descriptor)

    def receive(self, known: Sequence[torch.Tensor] = ()) -> Any:
        """Return what was sent.

        Args:
            known: What the other end may refer to, by index.

        Raises:
            EOFError: If the other end is gone.
        """
        header, descriptors = receive_message(self._line, _HEADER.size, 1)
        if len(header) < _HEADER.size:
            raise EOFError
        if descriptors:
            self._theirs = map_segment(descriptors[0])
        (length,) = _HEADER.unpack(header)
        places, payload = pickle.loads(self._read(length))
        tensors = [tensor_at(self._theirs, place) for place in places]
        return _Unpickler(io.BytesIO(payload), tensors, known).load()

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
        payload: It, pickled, without its tensors.
        tensors: These.

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
        self.payload, self.tensors = file.getvalue(), pickler.tensors


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Leaves out tensors, and remembers them."""

    def __init__(self, file: io.BytesIO, known: Mapping[int, int]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[torch.Tensor] = []
        self._known = known

    def persistent_id(self, value: object) -> object:
        if not isinstance(value, torch.Tensor):
            return None
        if id(value) in self._known:
            return "known", self._known[id(value)]
        if value.layout is not torch.strided or value.device.type != "cpu":
            return None
        self.tensors.append(value)
        return "here", len(self.tensors) - 1


class _Unpickler(pickle.Unpickler):
    """Puts them in again."""

    def __init__(
        self, file: io.BytesIO, here: Sequence[torch.Tensor], known: Sequence[torch.Tensor]
    ) -> None:
        super().__init__(file)
        self._tensors = {"here": here, "known": known}

    def persistent_load(self, key: tuple[str, int]) -> torch.Tensor:
        kind, index = key
        tensor = self._tensors[kind][index]
        # The next message will lie where this one does.
        return tensor if kind == "known" else tensor.clone()


def tensor_at(memory: torch.Tensor, place: Place) -> torch.Tensor:
    """The tensor that lies in ``memory``, which is bytes, at ``place``."""
    dtype, start, shape, stride = place
    empty = torch.empty(0, dtype=dtype)
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
