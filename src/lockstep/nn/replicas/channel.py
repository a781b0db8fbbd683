"""Messages between two processes; their tensors go through shared memory.

On the CPU the shared memory is a ``Segment``; an accelerator's memory is shared by the handle of
its driver. ``SharedMemory`` and a ``SharedTensor`` arrive as tensors in the same memory.
"""

from __future__ import annotations

import ctypes
import io
import math
import os
import pickle
import socket
import struct
import traceback
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import cloudpickle
import torch
from torch import nn
from torch.multiprocessing.reductions import reduce_tensor

from lockstep.comm import Segment, map_segment, receive_message, send_message, shut_down
from lockstep.nn.replicas.group import is_one, mark_as_one
from lockstep.nn.replicas.nested import has_itself_as_dict

_HEADER = struct.Struct("<QQ")  # the lengths of the two parts of the message
_MOST_DESCRIPTORS = 8
_ALIGNMENT_BYTES = 64


class Request(NamedTuple):
    """A call for the receiver to run: of a function, or of its own method by name."""

    function: Any
    arguments: tuple[Any, ...]


class Error(NamedTuple):
    """A pickled exception, and its formatted traceback, which may be empty."""

    error: bytes
    traceback: str

    @classmethod
    def of(cls, error: Exception, *, with_traceback: bool) -> Error:
        """Return ``error`` as an answer."""
        text = "".join(traceback.format_exception(error)).rstrip() if with_traceback else ""
        try:
            pickled = cloudpickle.dumps(error)
            pickle.loads(pickled)
        except Exception:
            pickled = pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
        return cls(pickled, text)

    def exception(self) -> BaseException:
        """Return the exception that the other process raised."""
        error: BaseException = pickle.loads(self.error)
        if self.traceback:
            error.add_note(f"In its process:\n{self.traceback}")
        return error


class Channel:
    """One end of a connection between two processes.

    The sender copies each tensor of a value to its own shared memory on the tensor's device, and
    the receiver copies it from there. Every message uses the same memory, so a sender must wait for
    an answer before it sends again. Errors at the caller's end, ``is_caller``, are sent without
    their traceback. The connection's timeout applies to :meth:`send` and :meth:`receive`.
    """

    def __init__(
        self,
        connection: socket.socket,
        devices: Iterable[torch.device] = (),
        *,
        is_caller: bool = True,
    ) -> None:
        self._socket = connection
        self._devices = set(devices)
        self._is_caller = is_caller
        self._mine: dict[torch.device, SharedMemory] = {}
        self._theirs: dict[torch.device, torch.Tensor] = {}

    def close(self) -> None:
        """Shut the connection down, also for processes that have inherited the socket."""
        shut_down(self._socket)
        self._socket.close()

    def answer(self, run: Callable[[], object]) -> None:
        """Send the result of ``run()``, or the error of running or sending; raise an OSError."""
        try:
            result = run()
        except Exception as error:
            result = Error.of(error, with_traceback=not self._is_caller)
        try:
            self.send(result)
        except OSError:
            raise
        except Exception as error:  # pickling may raise anything
            if not self._is_caller:
                text = f"What the module has returned can't be sent to the caller: {error}."
                error = TypeError(text)
            self.send(Error.of(error, with_traceback=not self._is_caller))

    def send(self, value: object) -> None:
        """Send ``value``, a :class:`Packed` or any picklable object.

        Raises:
            OSError: If the other end is gone.
            Exception: If ``value`` can't be pickled; then nothing was sent.
        """
        packed = value if isinstance(value, Packed) else Packed(value)
        new = {
            device: shared_memory(2 * count, device)
            for device, count in packed.layout.num_bytes.items()
            if device not in self._mine or count > len(self._mine[device].here)
        }
        memories = self._mine | new
        for tensor, device, span in packed.tensors:
            tensor_at(memories[device].here, *span).copy_(tensor.detach())
        _settle({*self._devices, *memories, *self._theirs})
        handles = pickle.dumps({device: own.handle() for device, own in new.items()})
        segments = [*packed.segments, *(own.segment for own in new.values() if own.segment)]
        header = _HEADER.pack(len(handles), len(packed.payload))
        send_message(self._socket, header, [segment.descriptor for segment in segments])
        self._mine = memories
        self._socket.sendall(handles + packed.payload)

    def receive(self) -> Any:
        """Return the next value.

        If the sender's memory can't be mapped, the connection is closed.

        Raises:
            EOFError: If the other end is gone.
        """
        header, descriptors = receive_message(self._socket, _HEADER.size, _MOST_DESCRIPTORS)
        if len(header) < _HEADER.size:
            raise EOFError
        segments = []
        try:
            handles, payload = map(self._receive_bytes, _HEADER.unpack(header))
            while descriptors:
                segments.append(map_segment(descriptors.pop(0)))
            for device, handle in pickle.loads(handles).items():
                self._theirs[device] = handle[0](*handle[1]) if handle else segments.pop()
        except BaseException:
            # The sender takes this memory for mapped, and would not send it again.
            self.close()
            for descriptor in descriptors:
                os.close(descriptor)
            raise
        return _Unpickler(payload, segments, self._theirs).load()

    def _receive_bytes(self, length: int) -> bytearray:
        received = bytearray()
        while len(received) < length:
            part = self._socket.recv(min(length - len(received), 1 << 20))
            if not part:
                raise EOFError
            received += part
        return received


class Packed(cloudpickle.Pickler):  # type: ignore[misc]
    """A value, pickled without its tensors and segments, which are kept as attributes.

    ``known`` are, by ``id()``, tensors in shared memory, which arrive there.
    """

    def __init__(
        self, value: object, known: Mapping[int, SharedMemory | SharedTensor] | None = None
    ) -> None:
        file = io.BytesIO()
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[tuple[torch.Tensor, torch.device, Span]] = []
        self.layout = Layout()
        self.segments: list[Segment] = []
        self._known = known or {}
        self.dump(value)
        self.payload = file.getvalue()

    def persistent_id(self, value: object) -> object:  # noqa: D102 - pickle's
        if isinstance(value, _OfMessage):
            return value.device
        if not isinstance(value, SharedMemory) or value.segment is None:
            return None
        if value.segment not in self.segments:
            self.segments.append(value.segment)
        return self.segments.index(value.segment)

    def reducer_override(self, value: Any) -> Any:  # noqa: D102 - pickle's
        if has_itself_as_dict(value):
            return _empty_with_itself_as_dict, (type(value),), None, None, iter(value.items())
        if not isinstance(value, torch.Tensor):
            return super().reducer_override(value)
        if (shared := self._known.get(id(value))) is not None:
            return _as_leaf, (shared, isinstance(value, nn.Parameter), value.requires_grad)
        if value.layout is not torch.strided:
            return super().reducer_override(value)
        device, span = self.layout.add(value)
        self.tensors.append((value, device, span))
        return _copied, (_OfMessage(device), span, value.requires_grad, is_one(value))


class _OfMessage(NamedTuple):
    """The sender's memory on a device for the tensors of its messages."""

    device: torch.device


class _Unpickler(pickle.Unpickler):
    """Unpickles a value, and inserts shared memory: by number, or by device that of messages."""

    def __init__(
        self,
        payload: bytearray,
        segments: Sequence[torch.Tensor],
        memories: Mapping[torch.device, torch.Tensor],
    ) -> None:
        super().__init__(io.BytesIO(payload))
        self._segments, self._memories = segments, memories

    def persistent_load(self, key: Any) -> torch.Tensor:
        return self._segments[key] if isinstance(key, int) else self._memories[key]


def _copied(memory: torch.Tensor, span: Span, requires_grad: bool, is_one: bool) -> torch.Tensor:
    # The next message will overwrite this memory.
    tensor = tensor_at(memory, *span).clone()
    if is_one:
        mark_as_one(tensor)
    return tensor.requires_grad_(requires_grad)


def _empty_with_itself_as_dict(kind: type[dict[Any, Any]]) -> dict[Any, Any]:
    made = kind.__new__(kind)
    object.__setattr__(made, "__dict__", made)
    return made


def _as_leaf(tensor: torch.Tensor, is_parameter: bool, requires_grad: bool) -> torch.Tensor:
    if is_parameter:
        return nn.Parameter(tensor, requires_grad=requires_grad)
    return tensor.requires_grad_(requires_grad)


def _settle(devices: Iterable[torch.device]) -> None:
    """Synchronize ``devices``: the other process has streams of its own."""
    accelerator = torch.accelerator.current_accelerator()
    for device in devices:
        if accelerator is not None and device.type == accelerator.type:
            torch.accelerator.synchronize(device)


class SharedMemory:
    """A tensor, ``here``, that is all of a segment, or in an accelerator's memory.

    The segment's descriptor is closed when this object is freed.
    """

    def __init__(self, here: torch.Tensor, segment: Segment | None = None) -> None:
        self.here, self.segment = here.detach(), segment
        if segment is not None:
            weakref.finalize(self, segment.close)

    def handle(self) -> Any:
        """Return a function that maps an accelerator's memory, and its arguments."""
        return reduce_tensor(self.here) if self.segment is None else None

    __reduce__ = handle


def shared_memory(num_bytes: int, device: torch.device) -> SharedMemory:
    """Allocate shared memory on ``device``."""
    if device.type != "cpu":
        return SharedMemory(torch.empty(num_bytes, dtype=torch.uint8, device=device))
    segment, here = Segment.create(num_bytes)
    return SharedMemory(here, segment)


class SharedTensor(NamedTuple):
    """A tensor, ``here``, in a part of shared memory."""

    memory: SharedMemory
    span: Span
    here: torch.Tensor

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return tensor_at, (self.memory, *self.span)


def shared_like(tensors: Iterable[torch.Tensor]) -> list[SharedTensor]:
    """Return new tensors in shared memory, of the shapes and devices of given ones."""
    layout = Layout()
    spans = [layout.add(tensor) for tensor in tensors]
    with torch.inference_mode(False):  # inference tensors could not be trained
        memory = {d: shared_memory(count, d) for d, count in layout.num_bytes.items()}
        return [
            SharedTensor(memory[d], span, tensor_at(memory[d].here, *span)) for d, span in spans
        ]


# A tensor's position and layout in the memory of its device: dtype, offset, shape and strides.
Span = tuple[torch.dtype, int, tuple[int, ...], tuple[int, ...]]


class Layout:
    """Assigns tensors consecutive spans on each device; ``num_bytes`` is their size by device."""

    def __init__(self) -> None:
        self.num_bytes: dict[torch.device, int] = {}
        self._devices: dict[torch.device, torch.device] = {}  # one object each is pickled once

    def add(self, tensor: torch.Tensor) -> tuple[torch.device, Span]:
        """Return a device and a span, with the strides of ``torch.empty_like(tensor)``."""
        device = self._devices.setdefault(tensor.device, tensor.device)
        start = self.num_bytes.get(device, 0)
        size = -(-tensor.numel() * tensor.itemsize // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        self.num_bytes[device] = start + size
        # Not by an empty tensor on meta, for which torch imports SymPy.
        stride = (tensor if tensor.is_contiguous() else torch.empty_like(tensor)).stride()
        return device, (tensor.dtype, start, tuple(tensor.shape), stride)


def tensor_at(
    memory: torch.Tensor,
    dtype: torch.dtype,
    start: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
) -> torch.Tensor:
    """Return the tensor at a :data:`Span` in ``memory``, a tensor of bytes."""
    flat = memory.new_empty(0, dtype=dtype)
    if memory.device.type != "cpu":
        return flat.set_(memory.untyped_storage(), start // flat.element_size(), shape, stride)
    # In a storage of its own: torch.save() of a tensor saves its whole storage.
    if count := math.prod(shape):
        buffer = (ctypes.c_uint8 * memory.numel()).from_address(memory.data_ptr())
        buffer._tensor = memory  # type: ignore[attr-defined]  # keeps the memory alive
        flat = torch.frombuffer(buffer, dtype=dtype, count=count, offset=start)
    return flat.as_strided(shape, stride)
