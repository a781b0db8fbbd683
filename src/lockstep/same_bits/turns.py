"""Turns of threads at the global generators of random numbers, which a process has once."""

from __future__ import annotations

import os
import threading

from lockstep.deadline import Deadline
from lockstep.errors import CollectiveTimeout

# How long a thread waits for another one's turn: that may compute a shard meanwhile.
_PATIENCE_SECONDS = 1800.0
# How often it looks whether the other thread has ended in its turn.
_LOOK_SECONDS = 0.5


class Turns:
    """Lets one thread at a time have its turn, which it may begin several times.

    Unlike a lock of Python's it passes on if the thread that had its turn has ended, as a rank does
    that is a thread and raises; and any thread may end a turn, as Python may drop what holds one
    anywhere.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition(threading.Lock())
        self._thread: threading.Thread | None = None
        self._depth = 0

    def begin(self) -> threading.Thread:
        """Begin a turn of this thread, and return the thread, for :meth:`end`."""
        this = threading.current_thread()
        with self._condition:
            deadline = Deadline(_PATIENCE_SECONDS)
            while self._thread is not this and self._is_taken():
                if not deadline.left():
                    raise CollectiveTimeout(
                        f"The thread {self._thread!r} has had its turn at the generators of random "
                        f"numbers for {_PATIENCE_SECONDS:.0f} s."
                    )
                self._condition.wait(_LOOK_SECONDS)
            if self._thread is not this:
                self._thread, self._depth = this, 0
            self._depth += 1
        return this

    def end(self, thread: threading.Thread) -> None:
        """End a turn that ``thread`` has begun."""
        with self._condition:
            if self._thread is thread:
                self._depth -= 1
                if not self._depth:
                    self._thread = None
                    self._condition.notify()

    def _is_taken(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def __enter__(self) -> None:
        """Begin a turn."""
        self.begin()

    def __exit__(self, *_: object) -> None:
        """End it."""
        self.end(threading.current_thread())

    def renew(self) -> None:
        """Forget all turns: this is the child of a fork, and other threads aren't in it."""
        depth = self._depth if self._thread is threading.current_thread() else 0
        self._condition = threading.Condition(threading.Lock())
        self._thread, self._depth = (threading.current_thread(), depth) if depth else (None, 0)


# Held while samples are read in this process, and in a shard's turn.
exclusive = Turns()
os.register_at_fork(after_in_child=exclusive.renew)
