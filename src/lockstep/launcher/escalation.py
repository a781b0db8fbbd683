"""How ranks are asked to end: politely, then less so. Decides; the supervisor acts."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import NamedTuple

# How long the others may take to report a failure of theirs, once one rank has failed. Their
# reports come within some 10 ms, but a death by signal is known only when the kernel has torn
# the process down, and it may be the cause of them.
JUDGING_SECONDS = 0.2
_GIVE_UP_SECONDS = 5.0


class Step(NamedTuple):
    """Send ``signal``, or nothing if it is None, and go on after ``seconds``."""

    signal: int | None
    seconds: float


def after_failure(grace_seconds: float) -> list[Step]:
    """A rank has failed: see who else did, then end the others."""
    return [Step(None, JUDGING_SECONDS), *after_signal(signal.SIGTERM, grace_seconds)]


def after_signal(number: int, grace_seconds: float) -> list[Step]:
    """The launcher was sent ``number``: pass it on, as if the ranks had been sent it."""
    if number == signal.SIGINT:
        half = grace_seconds / 2
        return [Step(number, half), *after_signal(signal.SIGTERM, half)]
    return [Step(signal.SIGTERM, grace_seconds), *at_once()]


def at_once() -> list[Step]:
    """Don't ask."""
    return [Step(signal.SIGKILL, _GIVE_UP_SECONDS)]


class Escalation:
    """The steps that are still to be taken, and when the next is due."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self._steps = list(steps)
        self._due_at = 0.0

    def take(self, now: float) -> list[int]:
        """The signals to send now."""
        signals = []
        while self._steps and now >= self._due_at:
            step = self._steps.pop(0)
            self._due_at = now + step.seconds
            if step.signal is not None:
                signals.append(step.signal)
        return signals

    def seconds_left(self, now: float) -> float:
        """How long until there is something to do again."""
        return max(0.0, self._due_at - now)

    def exhausted(self, now: float) -> bool:
        """Whether all steps were taken, to no avail."""
        return not self._steps and now >= self._due_at
