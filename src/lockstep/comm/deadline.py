"""Time limits of loops that wait more than once."""

from __future__ import annotations

import time


class Deadline:
    """A point in time, given as a number of seconds from now.

    Args:
        seconds: How far away it is; may be infinite.
    """

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Return the seconds left until the deadline; 0 after it."""
        return max(0.0, self._end - time.monotonic())
