"""Saves that go on in a thread while the program does, and the memory that they write."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lockstep.checkpoint.folder import padded
from lockstep.checkpoint.tree import Range


class Background:
    """Saves one checkpoint at a time in a thread of this rank.

    The thread calls no collectives: their order among the program's would differ between ranks.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def copied(self, ranges: Sequence[Range]) -> list[Range]:
        """Copy all elements into one buffer, which is kept for the next save."""
        total = sum(padded(piece.elements.nbytes) for piece in ranges)
        if self._memory.numel() < total:
            self._memory = torch.empty(total, dtype=torch.uint8, device="cpu")
        at, copies = 0, []
        for key, start, elements in ranges:
            target = self._memory[at : at + elements.nbytes].view(elements.dtype)
            copies.append(Range(key, start, target.copy_(elements)))
            at += padded(elements.nbytes)
        return copies

    def start(self, run: Callable[[], Exception | None]) -> None:
        """Start a thread that keeps the error that ``run`` returns."""

        def keep_error() -> None:
            self._error = run()

        if not _backgrounds:
            atexit.register(_at_exit)
        _backgrounds.add(self)
        # No daemon: the interpreter waits for it.
        self._thread = threading.Thread(target=keep_error, name="lockstep-save")
        self._thread.start()

    def finish(self) -> Exception | None:
        """Wait for the save that is going on; return its error, if it failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        return error


# By process group. A group's entry goes with the group, but not before its thread has ended.
_by_group: weakref.WeakKeyDictionary[Any, Background] = weakref.WeakKeyDictionary()
# Those that have started a thread.
_backgrounds: set[Background] = set()


def background_of(group: Any) -> Background:
    """Return this rank's :class:`Background` for saves over ``group``."""
    return _by_group.setdefault(group, Background())


def _at_exit() -> None:
    errors = [error for each in _backgrounds if (error := each.finish()) is not None]
    for error in errors:
        traceback.print_exception(error)
    if errors:
        print("lockstep: the last checkpoint was not saved.", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        # An exception of an exit handler wouldn't be the program's exit code.
        os._exit(1)
