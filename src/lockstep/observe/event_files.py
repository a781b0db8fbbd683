"""Files of numbers that TensorBoard shows, written without it.

Its own writer has a thread, whose faults end in a traceback on the terminal.

Source: ``tensorboard/compat/proto/event.proto`` and ``summary.proto``, and the TFRecord format: a
length, its checksum, the data, its checksum.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path

from lockstep.folders import Folder
from lockstep.observe.faults import make_folder

_MOST_FLOAT32 = 3.4028235e38


class EventFile:
    """A sink of ``log_to()``: a new file in a folder, to which whole events are written at once.

    Raises:
        OSError: If it can't be made.
    """

    def __init__(self, folder: Path) -> None:
        self.path, now = folder, time.time_ns()
        make_folder(folder)
        ending = f"{socket.gethostname()}.{os.getpid()}.{now % 10**9}"
        name = f"events.out.tfevents.{now // 10**9:010d}.{ending}"
        self._file = Folder(folder).new_file(name)
        self.close = self._file.close
        self._write([_event(_field(3, b"brain.Event:2"))])

    def __call__(self, step: int, values: Mapping[str, float]) -> None:
        """Append the values of a step."""
        self._write(
            [
                _event(_key(2, 0), _varint(step), _field(5, _field(1, _value(name, value))))
                for name, value in values.items()
            ]
        )

    def _write(self, events: list[bytes]) -> None:
        self._file.write(b"".join(map(_record, events)))
        self._file.flush()


def _event(*fields: bytes) -> bytes:
    """An ``Event`` of now: its time is field 1, the step 2, the version 3, a summary 5."""
    return _key(1, 1) + struct.pack("<d", time.time()) + b"".join(fields)


def _value(name: str, value: float) -> bytes:
    """A ``Summary.Value``: its name is field 1, a number of 32 bits field 2."""
    if abs(value) > _MOST_FLOAT32:
        value *= float("inf")
    text = name.encode(errors="replace")
    return _field(1, text) + _key(2, 5) + struct.pack("<f", value)


def _key(number: int, kind: int) -> bytes:
    """What begins a field of a message: its number, and how its value is encoded."""
    return bytes([number << 3 | kind])


def _field(number: int, data: bytes) -> bytes:
    """A field that is text or a message."""
    return _key(number, 2) + _varint(len(data)) + data


def _varint(number: int) -> bytes:
    """A number of 64 bits, in groups of seven, the lowest first."""
    number &= (1 << 64) - 1
    groups = []
    while number > 127:
        groups.append(number & 127 | 128)
        number >>= 7
    return bytes([*groups, number])


def _record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + _checksum(length) + data + _checksum(data)


def _checksum(data: bytes) -> bytes:
    """CRC-32C, rotated and shifted, as records have it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 255] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _of_byte(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
    return byte


_TABLE = [_of_byte(byte) for byte in range(256)]
