"""Writes to the launcher's stdout and stderr that wait for their readers in threads of their own.

A terminal after Ctrl-S takes nothing, nor does a pipe whose reader is a pager that isn't scrolled.
Nor does a descriptor tell beforehand whether it will: a terminal that polls as writable may block
in the middle of a line. The launcher has ranks to look after meanwhile, so it never writes itself.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable

from lockstep.errors import LaunchError

# Of what waits to be written; above it, ranks' output is left in their pipes, and they block there
# as they would at the terminal itself.
MOST_WAITING_BYTES = 1 << 20
# Small, so that a slow terminal is seen to move.
_CHUNK_BYTES = 4096


class StreamWriter:
    """Writes to one stream what it is given, in that order.

    Its thread is the only one that writes and removes what waits; :meth:`drop` has it stop.

    Args:
        descriptor: The stream.
        wake: Called by the thread when nothing waits any more, when there is room again after
            :attr:`is_full`, or when the stream can't be written.

    Raises:
        LaunchError: If no thread can be started.
    """

    def __init__(self, descriptor: int, wake: Callable[[], None]) -> None:
        self._descriptor, self._wake = descriptor, wake
        self._changed = threading.Condition()
        self._waiting = bytearray()
        self._moved_at = 0.0  # when the stream has last taken something, or something first waited
        self._error: OSError | None = None
        self._is_over = False  # what is put is dropped
        try:
            threading.Thread(target=self._write_all, daemon=True).start()
        except RuntimeError as error:
            raise LaunchError(
                "The launcher can't start a thread to write its output. Ask for fewer ranks, or "
                "raise the limit on processes (ulimit -u)."
            ) from error

    def put(self, data: bytes) -> None:
        """Have ``data`` written after all that waits."""
        with self._changed:
            if self._is_over or not data:
                return
            if not self._waiting:
                self._moved_at = time.monotonic()
            self._waiting += data
            self._changed.notify()

    @property
    def is_idle(self) -> bool:
        """Whether all is written, or won't be."""
        return not self._waiting

    @property
    def is_full(self) -> bool:
        """Whether so much waits that no more of the ranks' output is to be put."""
        return len(self._waiting) > MOST_WAITING_BYTES

    @property
    def stuck_seconds(self) -> float:
        """For how long the stream hasn't taken what waits."""
        return 0.0 if self.is_idle else time.monotonic() - self._moved_at

    def drop(self) -> None:
        """Forget what waits and what will be put."""
        with self._changed:
            self._is_over = True
            self._waiting.clear()
            self._changed.notify()

    def take_error(self) -> OSError | None:
        """Why the stream couldn't be written, once; None as long as it can, and afterwards."""
        error, self._error = self._error, None
        return error

    def _write_all(self) -> None:
        try:
            while chunk := self._next_chunk():
                self._wrote(self._write(chunk))
        except OSError as error:
            self._error = error
            self.drop()
            self._wake()

    def _next_chunk(self) -> bytes:
        """What is to be written next, once there is something; nothing if all is dropped."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_over)
            return bytes(self._waiting[:_CHUNK_BYTES])

    def _write(self, chunk: bytes) -> int:
        while True:
            try:
                return os.write(self._descriptor, chunk)
            except BlockingIOError:  # another program has made it non-blocking
                poll = select.poll()
                poll.register(self._descriptor, select.POLLOUT)
                poll.poll()

    def _wrote(self, num_bytes: int) -> None:
        with self._changed:
            was_full = self.is_full
            del self._waiting[:num_bytes]
            self._moved_at = time.monotonic()
            is_news = self.is_idle or (was_full and not self.is_full)
        if is_news:
            self._wake()
