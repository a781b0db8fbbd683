"""Signals that are taken when there is time for them, rather than wherever they strike."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import FrameType

# What ends a launcher, and would otherwise leave its ranks to themselves.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_Handler = Callable[[int, FrameType | None], None]


class SignalPipe:
    """A pipe that becomes readable when a signal comes.

    Attributes:
        descriptors: Both ends.
        pending: The ending signals that came and haven't been handled.
        child_ended: Whether a child has ended; to be reset by who looks.
    """

    def __init__(self) -> None:
        self.descriptors = os.pipe()
        self.pending: list[int] = []
        self.child_ended = False
        for descriptor in self.descriptors:
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(self.descriptors[1], warn_on_full_buffer=False)
        handle_ending_signals(lambda number, frame: None)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)

    def fileno(self) -> int:
        """The end to wait at."""
        return self.descriptors[0]

    def pull(self) -> None:
        """Take what has come."""
        try:
            came = os.read(self.descriptors[0], 4096)
        except BlockingIOError:
            return
        self.pending += [number for number in came if number in ENDING]
        self.child_ended |= signal.SIGCHLD in came

    def is_pending(self) -> bool:
        """Whether an ending signal has come, looking once more."""
        self.pull()
        return bool(self.pending)


def handle_ending_signals(handler: _Handler) -> None:
    """Install ``handler``, but for signals to be ignored: nohup asks for that, and a shell's &."""
    for number in ENDING:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)
