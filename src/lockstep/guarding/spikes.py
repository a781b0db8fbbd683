"""The norms of a rank's gradients in good steps, and which ranks' are far beyond them."""

from __future__ import annotations

import math
import statistics
import struct
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

# So many steps are remembered, and so many are needed before one can be too large.
_WINDOW, _LEAST = 64, 16
# No deviation is taken to be smaller than this part of the mean: steps may be all alike.
_LEAST_DEVIATION = 0.1


class Spike(NamedTuple):
    """Ranks whose gradients are too large.

    Attributes:
        ranks: These ranks, of the group; the one with the largest comes first.
        text: How large, in words.
    """

    ranks: tuple[int, ...]
    text: str


class Norms:
    """The largest norm of the ranks' gradients in each of the last good steps; alike on all."""

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=_WINDOW)

    def add(self, by_rank: Sequence[float]) -> None:
        """Take up the norms of a good step."""
        largest = max(by_rank)
        if largest and math.isfinite(largest):
            self._last.append(largest)

    def spike(self, by_rank: Sequence[float], deviations: float) -> Spike | None:
        """Return which norms are more than so many deviations above the mean of the last ones."""
        if len(self._last) < _LEAST:
            return None
        mean = statistics.fmean(self._last)
        deviation = max(statistics.pstdev(self._last, mean), _LEAST_DEVIATION * mean)
        limit = mean + deviations * deviation
        ranks = [rank for rank, norm in enumerate(by_rank) if norm > limit]
        if not ranks:
            return None
        ranks.sort(key=lambda rank: -by_rank[rank])
        far = (by_rank[ranks[0]] - mean) / deviation
        return Spike(
            tuple(ranks),
            f"the norm of its gradients is {by_rank[ranks[0]]:.4g}, {far:.3g} deviations above the "
            f"mean of the last {len(self._last)} steps, {mean:.4g}",
        )

    def state(self) -> list[float]:
        """Return what :meth:`load` takes."""
        return [*self._last]

    def load(self, state: Iterable[float]) -> None:
        """Take up what :meth:`state` returned."""
        self._last = deque(map(float, state), maxlen=_WINDOW)


def as_int(number: float) -> int:
    """Return the bits of ``number``, which ranks exchange with other integers."""
    (bits,) = struct.unpack("<q", struct.pack("<d", number))
    return int(bits)


def as_float(bits: int) -> float:
    """Return what :func:`as_int` was called of."""
    (number,) = struct.unpack("<d", struct.pack("<q", bits))
    return float(number)
