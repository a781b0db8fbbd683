"""Waiting for what other threads and processes do."""

from __future__ import annotations

from collections.abc import Callable

from lockstep.deadline import Deadline


def until(condition: Callable[[], object], seconds: float = 60.0) -> bool:
    """Whether ``condition`` became true within ``seconds``: many, as machines may stand still."""
    return Deadline(seconds).until(condition, 0.02)
