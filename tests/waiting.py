"""Waiting for what other threads and processes do."""

from __future__ import annotations

import time
from collections.abc import Callable

from lockstep.deadline import Deadline


def until(condition: Callable[[], object], seconds: float = 60.0) -> bool:
    """Whether ``condition`` became true within ``seconds``: many, as machines may stand still."""
    deadline, pause = Deadline(seconds), 0.001
    while not condition():
        if not deadline.left():
            return False
        time.sleep(pause)
        pause = min(2 * pause, 0.02)
    return True
