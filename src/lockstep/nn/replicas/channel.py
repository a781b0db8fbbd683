"""Values and requests between two processes; tensors go through memory that both have mapped.

That memory is a segment on the CPU, and elsewhere goes by the device's handle. ``SharedTensors``
and ``TensorByHandle`` arrive as the tensors that they stand for, in the same memory.
"""

from __future__ import annotations

import ctypes
import functools
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
from torch.multiprocessing.reductions import reduce_tensor

from lockstep.comm import Segment, map_segment, receive_message, send_message, shut_down
from lockstep.nn.replicas.group import is_one, mark_as_one

_HEADER = struct.Struct("<Q")  # the length of the message
_MOST_DESCRIPTORS = 8
_ALIGNMENT_BYTES = 64

Reduced = tuple[Callable[..., Any], tuple[Any, ...]]


class Request(NamedTuple):
    """A call that the other end is to run: of a function, or of its own method of that name."""

    function: Any
    arguments: tuple[Any, ...]


class Error(NamedTuple):
    """An exception, pickled, and its traceback in words, which may be empty."""

    error: bytes
    traceback: str

    @classmethod
    def of(cls, error: Exception, *, with_traceback: bool) -> Error:
        """The answer that carries ``error``."""
        text = "".join(traceback.format_exception(error)).rstrip() if with_traceback else ""
        try:
            pickled = cloudpickle.dumps(error)
            pickle.loads(pickled)
        except Exception:
            pickled = pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
        return cls(pickled, text)

    def exception(self) -> BaseException:
        """The exception that the other process has raised."""
        error: BaseException = pickle.loads(self.error)
        if self.traceback:
            error.add_note(f"In its process:\n{self.traceback}")
        return error


class Channel:
    """One end of a connection between two processes.

    Values are pickled, but for their tensors: these are copied to memory of the sender, on their
    device, that the receiver has mapped, and from there. It is the same for every message: after
    one, wait for an answer. The errors of the caller's end, ``is_caller``, need no traceback.
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

    def set_timeout(self, seconds: float) -> None:
        """Let :meth:`send` and :meth:`receive` raise TimeoutError after that time."""
        self._socket.settimeout(seconds)

    def close(self) -> None:
        """End the connection, also for processes that have inherited it."""
        shut_down(self._socket)
        self._socket.close()

    def answer(self, run: Callable[[], object]) -> None:
        """Send the result of ``run``, or the error of that or of sending it, unless an OSError."""
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
        """Send ``value``, which can be pickled, or is packed already.

        Raises:
            OSError: If the other end is gone.
            Exception: What pickling raises; then nothing was sent.
        """
        packed = value if isinstance(value, Packed) else Packed(value)
        spans, num_bytes = spans_of(packed.tensors)
        new = {
            device: SharedMemory(2 * count, device)
            for device, count in num_bytes.items()
            if device not in self._mine or count > len(self._mine[device].here)
        }
        memories = self._mine | new
        for tensor, span in zip(packed.tensors, spans, strict=True):
            tensor_at(memories[span.device].here, span).copy_(tensor.detach())
        _settle({*self._devices, *num_bytes, *self._theirs})
        # A segment goes as a descriptor.
        handles = {d: None if own.segment else reduce_tensor(own.here) for d, own in new.items()}
        segments = [own.segment for own in new.values() if own.segment] + packed.segments
        message = pickle.dumps((handles, spans, packed.payload))
        header = _HEADER.pack(len(message))
        send_message(self._socket, header, [segment.descriptor for segment in segments])
        self._mine = memories
        for memory in new.values():
            memory.close()
        self._socket.sendall(message)

    def receive(self, known: Sequence[torch.Tensor] = ()) -> Any:
        """Return the next value; ``known`` are the tensors that it may refer to, by index.

        Raises:
            EOFError: If the other end is gone.
            SharedMemoryFull: If its memory can't be mapped; then the connection is closed.
            Exception: What unpickling raises.
        """
        header, descriptors = receive_message(self._socket, _HEADER.size, _MOST_DESCRIPTORS)
        if len(header) < _HEADER.size:
            raise EOFError
        try:
            handles, spans, payload = pickle.loads(self._read(*_HEADER.unpack(header)))
            memory = []
            while descriptors:
                memory.append(map_segment(descriptors.pop(0)))
            for device, handle in handles.items():
                rebuild, arguments = handle or (memory.pop, (0,))
                self._theirs[device] = rebuild(*arguments)
        except BaseException:
            # The sender believes that this end has that memory.
            self.close()
            for descriptor in descriptors:
                os.close(descriptor)
            raise
        here = [tensor_at(self._theirs[span.device], span) for span in spans]
        return _Unpickler(payload, here=here, memory=memory, known=known).load()

    def _read(self, length: int) -> bytes:
        parts = []
        while length:
            part = self._socket.recv(min(length, 1 << 20))
            if not part:
                raise EOFError
            parts.append(part)
            length -= len(part)
        return b"".join(parts)


class Packed(cloudpickle.Pickler):  # type: ignore[misc]
    """A value, pickled without its tensors and segments, which are kept beside.

    ``known`` has, by its ``id()``, the index of each tensor that the other end knows.
    """

    def __init__(self, value: object, known: Mapping[int, int] | None = None) -> None:
        file = io.BytesIO()
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[torch.Tensor] = []
        self.segments: list[Segment] = []
        self._known = known or {}
        self.dump(value)
        self.payload = file.getvalue()

    def persistent_id(self, value: object) -> tuple[str, object] | None:  # noqa: D102 - pickle's
        if isinstance(value, TensorByHandle) and (segment := value.segment) is not None:
            if segment not in self.segments:
                self.segments.append(segment)
            return "memory", self.segments.index(segment)
        if not isinstance(value, torch.Tensor):
            return None
        if id(value) in self._known:
            return "known", self._known[id(value)]
        if value.layout is not torch.strided:
            return None
        self.tensors.append(value)
        return "here", (len(self.tensors) - 1, value.requires_grad, is_one(value))


class _Unpickler(pickle.Unpickler):
    """Inserts tensors and segments again."""

    def __init__(self, payload: bytes, **tensors: Any) -> None:
        super().__init__(io.BytesIO(payload))
        self._tensors = tensors

    def persistent_load(self, key: tuple[str, Any]) -> torch.Tensor:
        kind, which = key
        found: torch.Tensor
        if kind != "here":
            found = self._tensors[kind][which]
            return found
        index, requires_grad, is_one_of_all = which
        # The next message will lie where this one does.
        found = self._tensors[kind][index].clone().requires_grad_(requires_grad)
        if is_one_of_all:
            mark_as_one(found)
        return found


def _settle(devices: Iterable[torch.device]) -> None:
    """Wait until all is done on ``devices``: the other end's work is on other streams."""
    accelerator = torch.accelerator.current_accelerator()
    for device in devices:
        if accelerator is not None and device.type == accelerator.type:
            torch.accelerator.synchronize(device)


class Span(NamedTuple):
    """A tensor's position and layout in the memory of its device."""

    device: torch.device
    dtype: torch.dtype
    start: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class TensorByHandle:
    """A tensor, ``here``, of an accelerator, in whatever memory."""

    segment: Segment | None = None

    def __init__(self, tensor: torch.Tensor) -> None:
        self.here = tensor.detach()

    def __reduce__(self) -> Reduced:
        reduced: Reduced = reduce_tensor(self.here)
        return reduced


class SharedMemory(TensorByHandle):
    """Bytes on a device, which no further process can map once this object is gone or closed."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        if device.type == "cpu":
            self.segment, self.here = Segment.create(num_bytes)
            weakref.finalize(self, self.segment.close)
        else:
            super().__init__(torch.empty(num_bytes, dtype=torch.uint8, device=device))

    def close(self) -> None:
        """Let no further process map it."""
        if self.segment is not None:
            self.segment.close()


class SharedTensors:
    """Tensors in shared memory, like given ones; they arrive as a list."""

    def __init__(self, like: Sequence[torch.Tensor], device: torch.device) -> None:
        self._spans, num_bytes = spans_of(like)
        self._memory = SharedMemory(sum(num_bytes.values()), device)

    def close(self) -> None:
        """Let no further process map them."""
        self._memory.close()

    @functools.cached_property
    def here(self) -> list[torch.Tensor]:
        """The tensors."""
        return _tensors_at(self._memory.here, self._spans)

    def __reduce__(self) -> Reduced:
        return _tensors_at, (self._memory, self._spans)


def share(parameters: Sequence[torch.Tensor]) -> object:
    """An object that arrives as a list of ``parameters``; on the CPU these move to such memory."""
    if not all(parameter.device.type == "cpu" for parameter in parameters):
        return [TensorByHandle(parameter) for parameter in parameters]
    shared = SharedTensors(parameters, torch.device("cpu"))
    # Tensors of inference mode could not be trained.
    with torch.inference_mode(False), torch.no_grad():
        for parameter, there in zip(parameters, shared.here, strict=True):
            parameter.data = there.copy_(parameter)
    return shared


def spans_of(tensors: Sequence[torch.Tensor]) -> tuple[list[Span], dict[torch.device, int]]:
    """Consecutive spans for ``tensors`` on each device, and the bytes that they take there.

    Strides are those of the tensors, if these have no gaps.
    """
    spans: list[Span] = []
    ends: dict[torch.device, int] = {}
    for tensor in tensors:
        device, start = tensor.device, ends.get(tensor.device, 0)
        # Not by an empty tensor on meta: for one, torch imports a library for algebra.
        stride = (tensor if tensor.is_contiguous() else torch.empty_like(tensor)).stride()
        spans.append(Span(device, tensor.dtype, start, tuple(tensor.shape), stride))
        num_bytes = tensor.numel() * tensor.itemsize
        ends[device] = start + -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    return spans, ends


def tensor_at(memory: torch.Tensor, span: Span) -> torch.Tensor:
    """The tensor in ``memory``, which is bytes, at ``span``."""
    _, dtype, start, shape, stride = span
    flat = memory.new_empty(0, dtype=dtype)
    if memory.device.type != "cpu":
        return flat.set_(memory.untyped_storage(), start // flat.element_size(), shape, stride)
    # In a storage of its own: to save one tensor isn't to save all.
    if count := math.prod(shape):
        flat = torch.frombuffer(bytes_of(memory), dtype=dtype, count=count, offset=start)
    return flat.as_strided(shape, stride)


def _tensors_at(memory: torch.Tensor, spans: Sequence[Span]) -> list[torch.Tensor]:
    return [tensor_at(memory, span) for span in spans]


def bytes_of(tensor: torch.Tensor) -> ctypes.Array[ctypes.c_uint8]:
    """The memory of ``tensor``, of uint8 on the CPU, to be read and written without torch."""
    own = (ctypes.c_uint8 * tensor.numel()).from_address(tensor.data_ptr())
    own._tensor = tensor  # type: ignore[attr-defined]  # keeps the memory alive
    return own
