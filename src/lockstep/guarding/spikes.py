"""The norms of gradients and the losses of good steps, and which ranks' are far beyond them."""

from __future__ import annotations

import math
import statistics
import struct
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

# So many steps are remembered, and so many are needed before one can be too large.
_WINDOW, _LEAST = 64, 16
# No deviation is taken to be smaller than this part of the mean: steps may be all alike.
_LEAST_DEVIATION = 0.1


class Spike(NamedTuple):
    """Ranks whose gradients or losses are too large.

    Attributes:
        ranks: These ranks, of the group; the one with the largest comes first.
        text: How large, in words.
    """

    ranks: tuple[int, ...]
    text: str


class Window(ABC):
    """What the ranks had in each of the last good steps, as one number; alike on all of them."""

    what = ""

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=_WINDOW)

    def add(self, by_rank: Sequence[float]) -> None:
        """Take up what the ranks had in a good step."""
        value = self._of_all(by_rank)
        if math.isfinite(value) and self._counts(value):
            self._last.append(value)

    def spike(self, by_rank: Sequence[float], deviations: float) -> Spike | None:
        """Return which ranks make it more than so many deviations above the mean of the last."""
        if len(self._last) < _LEAST:
            return None
        mean = statistics.fmean(self._last)
        deviation = max(statistics.pstdev(self._last, mean), _LEAST_DEVIATION * abs(mean))
        limit, value = mean + deviations * deviation, self._of_all(by_rank)
        ranks = [rank for rank, each in enumerate(by_rank) if each > limit]
        if not ranks or value <= limit or not deviation:
            return None
        ranks.sort(key=lambda rank: -by_rank[rank])
        far = (value - mean) / deviation
        return Spike(
            tuple(ranks),
            f"the {self.what} is {value:.4g}, {far:.3g} deviations above the mean of the last "
            f"{len(self._last)} steps, {mean:.4g}",
        )

    @abstractmethod
    def _of_all(self, by_rank: Sequence[float]) -> float:
        """Return the number for what each rank has."""

    def _counts(self, value: float) -> bool:
        return True

    def state(self) -> list[float]:
        """Return what :meth:`load` takes."""
        return [*self._last]

    def load(self, state: Iterable[float]) -> None:
        """Take up what :meth:`state` returned."""
        self._last = deque(map(float, state), maxlen=_WINDOW)


class Norms(Window):
    """The largest norm of the ranks' gradients in each of the last good steps."""

    what = "norm of its gradients"

    def _of_all(self, by_rank: Sequence[float]) -> float:
        return max(by_rank)

    def _counts(self, value: float) -> bool:
        return value != 0  # which ranks without data have


class Losses(Window):
    """The mean of the ranks' losses in each of the last good steps; NaN stands for no loss."""

    what = "mean of the ranks' losses"

    def _of_all(self, by_rank: Sequence[float]) -> float:
        told = [each for each in by_rank if not math.isnan(each)]
        return sum(each / len(told) for each in told) if told else math.nan


class Judge:
    """Judges what the ranks have in a guarded step by what they had in those before.

    Attributes:
        spike: What is too large, if something is.
    """

    def __init__(self) -> None:
        self.spike: Spike | None = None
        self._of_step: list[tuple[Window, list[float]]] = []

    def judge(
        self, windows: Iterable[Window], by_rank: Sequence[Sequence[int]], deviations: float
    ) -> None:
        """Judge what each rank tells for each of ``windows``, as :func:`as_int` has made it."""
        for column, window in enumerate(windows):
            values = [as_float(told[column]) for told in by_rank]
            self.spike = window.spike(values, deviations)
            if self.spike is not None:
                return
            self._of_step.append((window, values))

    def remember(self) -> None:
        """Take up what was judged, as the step was good."""
        for window, values in self._of_step:
            window.add(values)


def as_int(number: float) -> int:
    """Return the bits of ``number``, which ranks exchange with other integers."""
    (bits,) = struct.unpack("<q", struct.pack("<d", number))
    return int(bits)


def as_float(bits: int) -> float:
    """Return what :func:`as_int` was called of."""
    (number,) = struct.unpack("<d", struct.pack("<q", bits))
    return float(number)
