"""From the bytes that ranks write to whole, labelled lines. Nothing here reads or writes."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable

# A line that never ends must not fill the memory: from here on it is cut.
MAX_LINE_BYTES = 1 << 20
_PIECE = re.compile(rb"[^\r\n]*(?:\r?\n|\r)")


class LineSplitter:
    r"""Cuts a stream into pieces, each a whole line.

    A piece ends in ``\n``, or in ``\r`` where the writer means to write over it: a progress bar
    has to be seen before its line is over.
    """

    def __init__(self, max_line_bytes: int = MAX_LINE_BYTES) -> None:
        # The chunks of a line that isn't over. They are joined once, at its end: joined at each
        # chunk, a line of a megabyte would be copied and searched again for every few bytes.
        self._chunks: list[bytes] = []
        self._num_bytes = 0  # in all of them
        self._max_line_bytes = max_line_bytes

    def feed(self, data: bytes) -> list[bytes]:
        """Take in ``data`` and return the pieces that it completes."""
        pieces: list[bytes] = []
        if end := max(data.rfind(b"\n"), data.rfind(b"\r")) + 1:
            # Only up to the last line's end: the pattern retries from each byte of what has none.
            pieces = _PIECE.findall(self._take() + data[:end])
        self._chunks.append(data[end:])
        self._num_bytes += len(data) - end
        if self._num_bytes >= self._max_line_bytes:
            line, size = self._take(), self._max_line_bytes
            whole = len(line) // size * size
            pieces += [line[at : at + size] + b"\n" for at in range(0, whole, size)]
            self._chunks, self._num_bytes = [line[whole:]], len(line) - whole
        return pieces

    def finish(self) -> list[bytes]:
        """What is left when the stream ends, made a whole line."""
        rest = self._take()
        return [rest + b"\n"] if rest else []

    def _take(self) -> bytes:
        line = b"".join(self._chunks)
        self._chunks, self._num_bytes = [], 0
        return line


class Labeller:
    r"""Labels the pieces of several sources that go to one destination.

    Invariant: what one source writes never continues a line of another. A piece that ends in
    ``\r`` leaves its line open, so another source's piece is preceded by a newline. So does one
    without an end, such as a prompt; its source's next piece goes on from there, with no label.
    """

    def __init__(self) -> None:
        self._open: Hashable = None  # whose piece the cursor stands on
        self._returned: set[Hashable] = set()  # whose last piece ended in \r
        self._unfinished: Hashable = None  # whose last piece, if it is the open one, has no end

    def label(self, source: Hashable, label: bytes, pieces: Iterable[bytes]) -> bytes:
        """The bytes to write for ``pieces``, which came from ``source``."""
        return b"".join(self._one(source, label, piece) for piece in pieces)

    def finish(self) -> bytes:
        """What to write at the very end, so that whatever comes next begins its own line."""
        was_open, self._open = self._open, None
        return b"\n" if was_open is not None else b""

    def _one(self, source: Hashable, label: bytes, piece: bytes) -> bytes:
        continues = source == self._unfinished == self._open
        if (
            piece == b"\r" and not continues
        ):  # tqdm writes it before a bar; there is nothing to show yet
            return b""
        if piece in (b"\n", b"\r\n") and source in self._returned:
            return self._end_bar(source)
        newline = b"\n" if self._open not in (None, source) else b""
        ends, returns = piece.endswith(b"\n"), piece.endswith(b"\r")
        self._open = None if ends else source
        self._unfinished = None if ends or returns else source
        (self._returned.add if returns else self._returned.discard)(source)
        return newline + (b"" if continues else label) + piece

    def _end_bar(self, source: Hashable) -> bytes:
        self._returned.discard(source)
        if self._open != source:  # another source's newline has ended it already
            return b""
        self._open = None
        return b"\n"
