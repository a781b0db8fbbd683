"""Contenders take turns, and the slowest rank's time counts.

Note [What a call's time is]: gradients are written by the rank that then gives them away, so
before each call every rank writes its whole buffer, and the others' caches have none of it. This
is the same for all contenders, and isn't counted.

Above ``_BACK_TO_BACK_BYTES`` the ranks then meet, and each makes one call. It takes from when the
first rank begins until the last one is through: a rank that got no core at first, as there are
fewer cores than ranks, must not seem quick. The ranks' clocks are one, that of their host.

Below, where a meeting's end is as uneven as the call is long, writes and calls follow each other
directly, as often as a turn has calls, and what the slowest rank spent in its calls counts; a
rank that waits for another to have written a small buffer waits for nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

_BACK_TO_BACK_BYTES = 64 * 1024
_WARM_UP_CALLS = 3
_SECONDS_PER_TURN = 0.03
_MOST_CALLS = 300


class Contender(NamedTuple):
    """One way to do it.

    Attributes:
        name: What it is called in the results.
        write: Writes this rank's buffer anew.
        call: What is timed.
    """

    name: str
    write: Callable[[], object]
    call: Callable[[], object]


class Ranks(Protocol):
    """The ranks that measure together."""

    rank: int
    size: int

    def meet(self) -> None:
        """Wait for all of them, and go on as much at once as may be."""

    def slowest(self, seconds: Sequence[float]) -> list[float]:
        """Return the largest that any rank has, place by place."""


def take_turns(
    ranks: Ranks, contenders: Sequence[Contender], num_bytes: int, rounds: int
) -> dict[str, list[float]]:
    """Return each contender's seconds a call in every round; all ranks return the same.

    Args:
        ranks: Who takes part; all of them call it.
        contenders: Who takes turns.
        num_bytes: How much a call is about. See Note [What a call's time is].
        rounds: How many turns each has.
    """
    apart = num_bytes > _BACK_TO_BACK_BYTES
    calls = {}
    for contender in contenders:
        # Also the first use of its memory, which costs more than any other.
        _turn(ranks, contender, _WARM_UP_CALLS, apart)
        calls[contender.name] = _num_calls(_turn(ranks, contender, _WARM_UP_CALLS, apart))
    seconds: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for number in range(rounds):
        # Whoever comes first finds another machine than whoever comes last.
        first = number % len(contenders)
        for contender in (*contenders[first:], *contenders[:first]):
            took = _turn(ranks, contender, calls[contender.name], apart)
            seconds[contender.name].append(took)
    return seconds


def _num_calls(seconds: float) -> int:
    """How many calls make a turn, if one takes ``seconds``."""
    return max(1, min(_MOST_CALLS, int(_SECONDS_PER_TURN / seconds)))


def _turn(ranks: Ranks, contender: Contender, calls: int, apart: bool) -> float:
    _, write, call = contender
    begins, ends = [], []
    ranks.meet()
    for _ in range(calls):
        write()
        if apart:
            ranks.meet()
        begins.append(time.perf_counter())
        call()
        ends.append(time.perf_counter())
        if apart:
            # Or else who is through takes a core, for the next write, from who isn't yet.
            ranks.meet()
    if not apart:
        (seconds,) = ranks.slowest([(sum(ends) - sum(begins)) / calls])
        return seconds
    last_ends, first_begins = ranks.slowest(ends), ranks.slowest([-begin for begin in begins])
    return (sum(last_ends) + sum(first_begins)) / calls
