"""Points in time up to which something is waited for."""

from __future__ import annotations

import time
from collections.abc import Callable

# The longest wait before a deadline is looked at again.
LOOK_SECONDS = 0.5


class Deadline:
    """A point in time, a number of ``seconds`` from now, which may be infinite.

    Another thread may bring it forward; a wait for it notices that within :data:`LOOK_SECONDS`.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    def restart(self) -> None:
        """Be ``seconds`` from now."""
        self._end = time.monotonic() + self.seconds

    def delay(self, seconds: float) -> None:
        """Be ``seconds`` later than it was."""
        self._end += seconds

    def left(self) -> float:
        """Return the seconds left until the deadline; 0 after it."""
        return max(0.0, self._end - time.monotonic())

    def passed(self) -> float:
        """Return the seconds since the deadline; 0 before it."""
        return max(0.0, time.monotonic() - self._end)

    def until(self, condition: Callable[[], object], pause: float) -> bool:
        """Wait until ``condition()`` holds; return whether it did before the deadline.

        It is called at ever longer intervals, of ``pause`` seconds at most.
        """
        interval = pause / 64
        while not condition():
            if not self.left():
                return False
            time.sleep(interval)
            interval = min(2 * interval, pause)
        return True

    def bring_forward(self, earlier: Deadline) -> None:
        """Be over when ``earlier`` is, if that is sooner."""
        if earlier._end < self._end:
            self.seconds, self._end = earlier.seconds, earlier._end
