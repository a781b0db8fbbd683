"""Messages between two processes; their tensors go through shared memory.

On the CPU the shared memory is a ``Segment``; an accelerator's memory is shared by the handle of
its driver. A ``SharedTensor`` or ``SharedPart`` arrives as a tensor in the same memory.
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

_HEADER = struct.Struct("<Q")  # the length of the message
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

    Values are pickled without their tensors. The sender copies each tensor to its own shared memory
    on the tensor's device, and the receiver copies it from there. Every message uses the same
    memory, so a sender must wait for an answer before it sends again. Errors at the caller's end,
    ``is_caller``, are sent without their traceback. The connection's timeout applies to
    :meth:`send` and :meth:`receive`.
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
        self._mine: dict[torch.device, SharedTensor] = {}
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
        num_bytes = packed.layout.num_bytes
        new = {
            device: shared_memory(2 * count, device)
            for device, count in num_bytes.items()
            if device not in self._mine or count > len(self._mine[device].here)
        }
        memories = self._mine | new
        for tensor, span in packed.tensors:
            tensor_at(memories[span.device].here, span).copy_(tensor.detach())
        _settle({*self._devices, *num_bytes, *self._theirs})
        message = Packed((new, packed.payload), segments=packed.segments)
        header = _HEADER.pack(len(message.payload))
        send_message(self._socket, header, [each.descriptor for each in message.segments])
        self._mine = memories
        self._socket.sendall(message.payload)

    def receive(self) -> Any:
        """Return the next value.

        If the sender's memory can't be mapped, the connection is closed.

        Raises:
            EOFError: If the other end is gone.
        """
        header, descriptors = receive_message(self._socket, _HEADER.size, _MOST_DESCRIPTORS)
        if len(header) < _HEADER.size:
            raise EOFError
        (length,) = _HEADER.unpack(header)
        message, memory = bytearray(), []
        try:
            while len(message) < length:
                part = self._socket.recv(min(length - len(message), 1 << 20))
                if not part:
                    raise EOFError
                message += part
            while descriptors:
                memory.append(map_segment(descriptors.pop(0)))
            new, payload = _Unpickler(message, memory, {}).load()
        except BaseException:
            # The sender takes this memory for mapped, and would not send it again.
            self.close()
            for descriptor in descriptors:
                os.close(descriptor)
            raise
        self._theirs |= new
        return _Unpickler(payload, memory, self._theirs).load()


class _Key(NamedTuple):
    """A tensor's persistent id. It and its span are sent as tuples, which pickle much faster."""

    number: int | None  # the id() of a tensor to which the value may refer several times
    where: Any  # its span in the sender's memory, or its shared memory, which arrives as a tensor
    is_parameter: bool
    requires_grad: bool
    is_one: bool


class Packed(cloudpickle.Pickler):  # type: ignore[misc]
    """A value, pickled without its tensors and segments, which are kept as attributes.

    ``known`` are, by ``id()``, tensors to which the value may refer several times. Each arrives as
    one tensor; a parameter arrives in its shared memory. ``segments`` are the segments that the
    same message already has.
    """

    def __init__(
        self,
        value: object,
        known: Mapping[int, Shared] | None = None,
        segments: Iterable[Segment] = (),
    ) -> None:
        file = io.BytesIO()
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[tuple[torch.Tensor, Span]] = []
        self.layout = Layout()
        self.segments = [*segments]
        self._known = known or {}
        self.dump(value)
        self.payload = file.getvalue()

    def persistent_id(self, value: object) -> object:  # noqa: D102 - pickle's
        if isinstance(value, SharedTensor) and value.segment is not None:
            if value.segment not in self.segments:
                self.segments.append(value.segment)
            return self.segments.index(value.segment)
        if not isinstance(value, torch.Tensor):
            return None
        number = id(value) if id(value) in self._known else None
        if (shared := self._known.get(id(value))) is not None:
            is_parameter = isinstance(value, nn.Parameter)
            return tuple(_Key(number, shared, is_parameter, value.requires_grad, is_one=False))
        if value.layout is not torch.strided:
            return None
        span = self.layout.add(value)
        self.tensors.append((value, span))
        return tuple(_Key(number, tuple(span), False, value.requires_grad, is_one(value)))


class _Unpickler(pickle.Unpickler):
    """Unpickles a value, and inserts its tensors and segments."""

    def __init__(
        self,
        payload: bytes | bytearray,
        segments: Sequence[torch.Tensor],
        memories: Mapping[torch.device, torch.Tensor],
    ) -> None:
        super().__init__(io.BytesIO(payload))
        self._segments, self._memories = segments, memories
        self._known: dict[int, torch.Tensor] = {}

    def persistent_load(self, key: Any) -> torch.Tensor:
        if isinstance(key, int):
            return self._segments[key]
        key = _Key(*key)
        if key.number in self._known:
            return self._known[key.number]
        tensor: torch.Tensor
        if isinstance(key.where, tuple):  # the next message will overwrite this memory
            span = Span(*key.where)
            tensor = tensor_at(self._memories[span.device], span).clone()
        else:
            tensor = key.where
        if key.is_parameter:
            tensor = nn.Parameter(tensor, requires_grad=False)
        if key.is_one:
            mark_as_one(tensor)
        if key.number is not None:
            self._known[key.number] = tensor
        return tensor.requires_grad_(key.requires_grad)


def _settle(devices: Iterable[torch.device]) -> None:
    """Synchronize ``devices``: the other process has streams of its own."""
    accelerator = torch.accelerator.current_accelerator()
    for device in devices:
        if accelerator is not None and device.type == accelerator.type:
            torch.accelerator.synchronize(device)


class SharedTensor:
    """A tensor, ``here``, in a segment of its own or in an accelerator's memory.

    The segment's descriptor is closed when this object is freed.
    """

    def __init__(self, here: torch.Tensor, segment: Segment | None = None) -> None:
        self.here, self.segment = here.detach(), segment
        if segment is not None:
            weakref.finalize(self, segment.close)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        reduced: tuple[Callable[..., Any], tuple[Any, ...]] = reduce_tensor(self.here)
        return reduced


def shared_memory(num_bytes: int, device: torch.device) -> SharedTensor:
    """Allocate shared memory on ``device``."""
    if device.type != "cpu":
        return SharedTensor(torch.empty(num_bytes, dtype=torch.uint8, device=device))
    segment, here = Segment.create(num_bytes)
    return SharedTensor(here, segment)


class SharedPart(NamedTuple):
    """A tensor in a part of shared memory; it arrives as a tensor in the same memory."""

    memory: SharedTensor
    span: Span

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return tensor_at, (self.memory, self.span)


Shared = SharedTensor | SharedPart | None


class SharedTensors:
    """New tensors, ``here``, in shared memory, of the shapes and devices of given ones."""

    def __init__(self, like: Iterable[torch.Tensor]) -> None:
        layout = Layout()
        spans = [layout.add(tensor) for tensor in like]
        with torch.inference_mode(False):  # inference tensors could not be trained
            memory = {d: shared_memory(count, d) for d, count in layout.num_bytes.items()}
            self.parts = [SharedPart(memory[span.device], span) for span in spans]
            self.here = [tensor_at(part.memory.here, part.span) for part in self.parts]


class Span(NamedTuple):
    """A tensor's position and layout in the memory of its device."""

    device: torch.device
    dtype: torch.dtype
    start: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class Layout:
    """Assigns tensors consecutive spans on each device; ``num_bytes`` is their size by device."""

    def __init__(self) -> None:
        self.num_bytes: dict[torch.device, int] = {}
        self._devices: dict[torch.device, torch.device] = {}  # one object each is pickled once

    def add(self, tensor: torch.Tensor) -> Span:
        """Return a span for ``tensor``, with the strides of ``torch.empty_like(tensor)``."""
        device = self._devices.setdefault(tensor.device, tensor.device)
        start = self.num_bytes.get(device, 0)
        size = -(-tensor.numel() * tensor.itemsize // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        self.num_bytes[device] = start + size
        # Not by an empty tensor on meta, for which torch imports SymPy.
        stride = (tensor if tensor.is_contiguous() else torch.empty_like(tensor)).stride()
        return Span(device, tensor.dtype, start, tuple(tensor.shape), stride)


def tensor_at(memory: torch.Tensor, span: Span) -> torch.Tensor:
    """Return the tensor at ``span`` in ``memory``, a tensor of bytes."""
    _, dtype, start, shape, stride = span
    flat = memory.new_empty(0, dtype=dtype)
    if memory.device.type != "cpu":
        return flat.set_(memory.untyped_storage(), start // flat.element_size(), shape, stride)
    # In a storage of its own: torch.save() of a tensor saves its whole storage.
    if count := math.prod(shape):
        flat = torch.frombuffer(bytes_of(memory), dtype=dtype, count=count, offset=start)
    return flat.as_strided(shape, stride)


def bytes_of(tensor: torch.Tensor) -> ctypes.Array[ctypes.c_uint8]:
    """Return the memory of a uint8 tensor on the CPU as a ctypes array, which keeps it alive."""
    own = (ctypes.c_uint8 * tensor.numel()).from_address(tensor.data_ptr())
    own._tensor = tensor  # type: ignore[attr-defined]  # keeps the memory alive
    return own
