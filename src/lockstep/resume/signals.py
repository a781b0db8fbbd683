"""Signals that ask a program to stop: noted, so that it ends at a step's end."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StopSignals:
    """Notes the first signal that asks for a stop, while it is entered in the main thread.

    A second Ctrl-C does what it did before.

    Attributes:
        name: That of the signal that has come, "" if there was none.
    """

    def __init__(self) -> None:
        self.name = ""
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        """Install the handlers; in another thread there are none."""
        if threading.current_thread() is threading.main_thread():
            for each in _SIGNALS:
                before = signal.getsignal(each)
                if before is not None and before is not signal.SIG_IGN:  # not Python's, or unwanted
                    self._before[each] = signal.signal(each, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        """Put the former handlers back."""
        if threading.current_thread() is threading.main_thread():
            for each, before in self._before.items():
                if signal.getsignal(each) == self._note:  # else the program has its own since
                    signal.signal(each, before)
        self._before.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        which = signal.Signals(number)
        if self.name and which is signal.SIGINT:
            before = self._before.get(which)
            (before if callable(before) else signal.default_int_handler)(number, frame)
        self.name = self.name or which.name
