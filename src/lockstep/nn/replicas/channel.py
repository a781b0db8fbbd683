"""Values that go from one process to another, their tensors through memory that both have mapped.

That memory is a segment on the CPU, and elsewhere goes by the device's handle. A ``SharedTensors``
or ``TensorByHandle`` that is sent arrives as the tensors that it stands for: the same memory.
"""

from __future__ import annotations

import collections
import ctypes
import functools
import io
import math
import os
import pickle
import socket
import struct
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import cloudpickle
import torch
from torch.multiprocessing.reductions import reduce_tensor

from lockstep.comm import Segment, map_segment, receive_message, send_message, shut_down
from lockstep.nn.replicas.group import is_one, mark_as_one

# The length of the message, and how many of its descriptors are those of the sender's memory.
_HEADER = struct.Struct("<QB")
_MOST_DESCRIPTORS = 8
_ALIGNMENT_BYTES = 64

Reduced = tuple[Callable[..., Any], tuple[Any, ...]]


class Channel:
    """One end of a connection between two processes.

    Values are pickled, but for their tensors: these are copied to memory of the sender, on their
    device, that the receiver has mapped, and from there. It is the same for every message: after
    one, wait for an answer. A :class:`~lockstep.comm.shm.memory.Segment` arrives as its bytes.

    Args:
        line: A connected stream socket.
        devices: The devices of tensors that both ends have.
    """

    def __init__(self, line: socket.socket, devices: Iterable[torch.device] = ()) -> None:
        self._line = line
        self._devices = set(devices)
        self._mine: dict[torch.device, SharedMemory] = {}
        self._theirs: dict[torch.device, torch.Tensor] = {}

    def set_timeout(self, seconds: float) -> None:
        """Let :meth:`send_packed` and :meth:`receive` raise TimeoutError after that time."""
        self._line.settimeout(seconds)

    def close(self) -> None:
        """End the connection, also for processes that have inherited it."""
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
        """Send a value that is packed already; see :meth:`send`."""
        on_device: dict[torch.device, list[torch.Tensor]] = {}
        for tensor in packed.tensors:
            on_device.setdefault(tensor.device, []).append(tensor)
        new: dict[torch.device, SharedMemory] = {}
        spans: dict[torch.device, list[Span]] = {}
        for device, tensors in on_device.items():
            spans[device], num_bytes = spans_of(tensors)
            memory = self._mine.get(device)
            if memory is None or num_bytes > len(memory.here):
                memory = new[device] = SharedMemory(2 * num_bytes, device)
            for tensor, span in zip(tensors, spans[device], strict=True):
                tensor_at(memory.here, span).copy_(tensor.detach())
        _settle({*self._devices, *on_device, *self._theirs})
        envelope = Packed(new) if new else None
        segments = envelope.segments if envelope is not None else []
        message = pickle.dumps((envelope and envelope.payload, spans, packed.payload))
        header = _HEADER.pack(len(message), len(segments))
        segments = [*segments, *packed.segments]
        send_message(self._line, header, [segment.descriptor for segment in segments])
        self._mine |= new
        for memory in new.values():
            memory.close()
        self._line.sendall(message)

    def receive(self, known: Sequence[torch.Tensor] = ()) -> Any:
        """Return the next value.

        Args:
            known: The tensors that the other end may refer to, by index.

        Raises:
            EOFError: If the other end is gone.
            SharedMemoryFull: If its memory can't be mapped; then the connection is closed.
            Exception: What unpickling raises.
        """
        header, descriptors = receive_message(self._line, _HEADER.size, _MOST_DESCRIPTORS)
        if len(header) < _HEADER.size:
            raise EOFError
        length, count = _HEADER.unpack(header)
        try:
            envelope, spans, payload = pickle.loads(self._read(length))
            memory = []
            while descriptors:
                memory.append(map_segment(descriptors.pop(0)))
            if envelope is not None:
                self._theirs |= _Unpickler(envelope, {}, memory[:count], ()).load()
        except BaseException:
            # The sender believes that this end has that memory.
            self.close()
            for descriptor in descriptors:
                os.close(descriptor)
            raise
        here = {
            device: [tensor_at(self._theirs[device], span) for span in own]
            for device, own in spans.items()
        }
        return _Unpickler(payload, here, memory[count:], known).load()

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
    """A value, pickled without its tensors and segments, which are kept beside.

    Args:
        value: The value.
        known: By its ``id()``, the index of each tensor that the other end knows.

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
    """Leaves out tensors and segments, and collects them."""

    def __init__(self, file: io.BytesIO, known: Mapping[int, int]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[torch.Tensor] = []
        self.segments: list[Segment] = []
        self._known = known
        self._counts: collections.Counter[torch.device] = collections.Counter()

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
        self.tensors.append(value)
        self._counts[value.device] += 1
        index = self._counts[value.device] - 1
        return "here", (value.device, index, value.requires_grad, is_one(value))


class _Unpickler(pickle.Unpickler):
    """Inserts tensors and segments again."""

    def __init__(
        self,
        payload: bytes,
        here: Mapping[torch.device, Sequence[torch.Tensor]],
        memory: Sequence[torch.Tensor],
        known: Sequence[torch.Tensor],
    ) -> None:
        super().__init__(io.BytesIO(payload))
        self._here, self._memory, self._known = here, memory, known

    def persistent_load(self, key: tuple[str, Any]) -> torch.Tensor:
        kind, which = key
        if kind == "here":
            device, index, requires_grad, is_one_of_all = which
            # The next message will lie where this one does.
            own: torch.Tensor = self._here[device][index].clone()
            own.requires_grad_(requires_grad)
            if is_one_of_all:
                mark_as_one(own)
            return own
        found = self._memory if kind == "memory" else self._known
        return found[int(which)]


def _settle(devices: Iterable[torch.device]) -> None:
    """Wait until all is done on ``devices``: the other end's work is on other streams."""
    accelerator = torch.accelerator.current_accelerator()
    for device in devices:
        if accelerator is not None and device.type == accelerator.type:
            torch.accelerator.synchronize(device)


class Span(NamedTuple):
    """A tensor's layout in memory, from its first byte on."""

    dtype: torch.dtype
    start: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class SharedMemory:
    """Memory on a device, which no further process can map once this object is gone or closed.

    Attributes:
        here: The memory, as bytes.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.segment: Segment | None = None
        if device.type == "cpu":
            self.segment, self.here = Segment.create(num_bytes)
            weakref.finalize(self, self.segment.close)
        else:
            self.here = torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def close(self) -> None:
        """Let no further process map it."""
        if self.segment is not None:
            self.segment.close()

    def __reduce__(self) -> Reduced:
        if self.segment is None:
            reduced: Reduced = reduce_tensor(self.here)
            return reduced
        return _itself, (self.segment,)


class SharedTensors:
    """Tensors in shared memory, like given ones; they arrive as a list."""

    def __init__(self, like: Sequence[torch.Tensor], device: torch.device) -> None:
        self._spans, num_bytes = spans_of(like)
        self._memory = SharedMemory(num_bytes, device)

    def close(self) -> None:
        """Let no further process map them."""
        self._memory.close()

    @functools.cached_property
    def here(self) -> list[torch.Tensor]:
        """The tensors, all in one storage."""
        return _tensors_at(self._memory.here, self._spans)

    def alone(self) -> list[torch.Tensor]:
        """The tensors, on the CPU, each in a storage of its own: saving one doesn't save all."""
        memory = bytes_of(self._memory.here)
        tensors = []
        for dtype, start, shape, stride in self._spans:
            count = math.prod(shape)
            flat = torch.empty(0, dtype=dtype)
            if count:
                flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=start)
            tensors.append(flat.as_strided(shape, stride))
        return tensors

    def __reduce__(self) -> Reduced:
        return _tensors_at, (self._memory, self._spans)


class TensorByHandle:
    """A tensor of an accelerator, in whatever memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __reduce__(self) -> Reduced:
        reduced: Reduced = reduce_tensor(self._tensor.detach())
        return reduced


def share(parameters: Sequence[torch.Tensor]) -> object:
    """An object that arrives as a list of ``parameters``; on the CPU these move to such memory."""
    if not all(parameter.device.type == "cpu" for parameter in parameters):
        return [TensorByHandle(parameter) for parameter in parameters]
    shared = SharedTensors(parameters, torch.device("cpu"))
    # Tensors of inference mode could not be trained.
    with torch.inference_mode(False), torch.no_grad():
        for parameter, there in zip(parameters, shared.alone(), strict=True):
            parameter.data = there.copy_(parameter)
    return shared


def tensor_at(memory: torch.Tensor, span: Span) -> torch.Tensor:
    """The tensor in ``memory``, which is bytes, at ``span``."""
    dtype, start, shape, stride = span
    empty = memory.new_empty(0, dtype=dtype)
    return empty.set_(memory.untyped_storage(), start // empty.element_size(), shape, stride)


def _tensors_at(memory: torch.Tensor, spans: Sequence[Span]) -> list[torch.Tensor]:
    return [tensor_at(memory, span) for span in spans]


def spans_of(tensors: Sequence[torch.Tensor]) -> tuple[list[Span], int]:
    """Consecutive spans for ``tensors``, with the strides that they have, if these have no gaps."""
    spans: list[Span] = []
    num_bytes = 0
    for tensor in tensors:
        stride = torch.empty_like(tensor, device="meta").stride()
        spans.append(Span(tensor.dtype, num_bytes, tuple(tensor.shape), stride))
        num_bytes += -(-tensor.numel() * tensor.itemsize // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    return spans, num_bytes


def bytes_of(tensor: torch.Tensor) -> ctypes.Array[ctypes.c_uint8]:
    """The memory of ``tensor``, of uint8 on the CPU, to be read and written without torch."""
    own = (ctypes.c_uint8 * tensor.numel()).from_address(tensor.data_ptr())
    own._tensor = tensor  # type: ignore[attr-defined]  # keeps the memory alive
    return own


def _itself(memory: torch.Tensor) -> torch.Tensor:
    return memory
