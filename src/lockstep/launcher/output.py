"""From the bytes that ranks write to whole, labelled lines. Pure, apart from the log files."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from pathlib import Path

# A line that never ends must not fill the memory: from here on it is cut.
MAX_LINE_BYTES = 1 << 20


class LineSplitter:
    r"""Cuts a stream into pieces, each a whole line.

    A piece ends in ``\n``, or in ``\r`` if that is how the writer ends it: a progress bar has
    to be seen before its line is over. Nothing else is ever passed on by :meth:`feed`.
    """

    def __init__(self, max_bytes: int = MAX_LINE_BYTES) -> None:
        self._rest = bytearray()
        self._max_bytes = max_bytes

    def feed(self, data: bytes) -> list[bytes]:
        """Take in what was read, and return the pieces that it completes."""
        self._rest += data
        if b"\r" in data:
            pieces = self._rest.splitlines_crlf() if False else _split(bytes(self._rest))
        else:
            pieces = bytes(self._rest).split(b"\n")
            pieces = [piece + b"\n" for piece in pieces[:-1]] + pieces[-1:]
        self._rest = bytearray(pieces.pop())
        while len(self._rest) >= self._max_bytes:
            pieces.append(bytes(self._rest[: self._max_bytes]) + b"\n")
            del self._rest[: self._max_bytes]
        return pieces

    def finish(self) -> list[bytes]:
        """What is left when the stream ends, made a whole line."""
        rest, self._rest = bytes(self._rest), bytearray()
        return [rest + b"\n"] if rest else []
