"""Values that go from one process to another, their tensors through memory that both see."""

from __future__ import annotations

import collections
import io
import os
import pickle
import socket
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import cloudpickle
import torch

from lockstep.comm.shm.memory import Segment, map_segment
from lockstep.comm.shm.sockets import receive_message, send_message, shut_down
from lockstep.nn.replicas.shared import Place, SharedMemory, places_for, tensor_at

# How long the message is, and how many of its descriptors are those of the sender's memory.
_HEADER = struct.Struct("<QB")
_MOST_DESCRIPTORS = 8


class Wire:
    """One end of a line between two processes.

    What is sent is pickled, but for its tensors: these are copied to memory of the sender, on their
    device, that the receiver has too, and from there. It is the same for every message: after one,
    wait for an answer. A :class:`~lockstep.comm.shm.memory.Segment` arrives as its bytes.

    Args:
        line: A connected stream socket.
        devices: Where tensors are that both ends have.
    """

    def __init__(self, line: socket.socket, devices: Iterable[torch.device] = ()) -> None:
        self._line = line
        self._devices = set(devices)
        self._mine: dict[torch.device, SharedMemory] = {}
        self._theirs: dict[torch.device, torch.Tensor] = {}

    def set_timeout(self, seconds: float) -> None:
        """Wait no longer than that for the other end, to take what is sent or to go on with it.

        Then :meth:`send_packed` and :meth:`receive` raise TimeoutError.
        """
        self._line.settimeout(seconds)

    def fileno(self) -> int:
        """What to wait for until there is something to receive."""
        return self._line.fileno()

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
        on_device: dict[torch.device, list[torch.Tensor]] = {}
        for tensor in packed.tensors:
            on_device.setdefault(tensor.device, []).append(tensor)
        new: dict[torch.device, SharedMemory] = {}
        places: dict[torch.device, list[Place]] = {}
        for device, tensors in on_device.items():
            places[device], num_bytes = places_for(tensors)
            memory = self._mine.get(device)
            if memory is None or num_bytes > len(memory.here):
                memory = new[device] = SharedMemory(2 * num_bytes, device)
            for tensor, place in zip(tensors, places[device], strict=True):
                tensor_at(memory.here, place).copy_(tensor.detach())
        _settle({*self._devices, *on_device, *self._theirs})
        envelope = Packed(new) if new else None
        segments = envelope.segments if envelope is not None else []
        message = pickle.dumps((envelope and envelope.payload, places, packed.payload))
        header = _HEADER.pack(len(message), len(segments))
        segments = [*segments, *packed.segments]
        send_message(self._line, header, [segment.descriptor for segment in segments])
        self._mine |= new
        for memory in new.values():
            memory.close()
        self._line.sendall(message)

    def receive(self, known: Sequence[torch.Tensor] = ()) -> Any:
        """Return what was sent.

        Args:
            known: What the other end may refer to, by index.

        Raises:
            EOFError: If the other end is gone.
            SharedMemoryFull: If there is no room for its memory; then the line is closed.
            Exception: What unpickling raises.
        """
        header, descriptors = receive_message(self._line, _HEADER.size, _MOST_DESCRIPTORS)
        if len(header) < _HEADER.size:
            raise EOFError
        length, count = _HEADER.unpack(header)
        try:
            envelope, places, payload = pickle.loads(self._read(length))
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
            device: [tensor_at(self._theirs[device], place) for place in own]
            for device, own in places.items()
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
    """A value that is ready to be sent.

    Attributes:
        payload: It, pickled, without its tensors and segments.
        tensors: These.
        segments: Likewise.

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
        return "here", (value.device, self._counts[value.device] - 1)


class _Unpickler(pickle.Unpickler):
    """Puts them in again."""

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
            device, index = which
            # The next message will lie where this one does.
            return self._here[device][int(index)].clone()
        found = self._memory if kind == "memory" else self._known
        return found[int(which)]


def _settle(devices: Iterable[torch.device]) -> None:
    """Wait until all is done on ``devices``: the other end's work is on other streams."""
    accelerator = torch.accelerator.current_accelerator()
    for device in devices:
        if accelerator is not None and device.type == accelerator.type:
            torch.accelerator.synchronize(device)
