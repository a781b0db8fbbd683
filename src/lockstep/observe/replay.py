"""Steps without something, such as data: by how much they would have been shorter.

What ranks did between two meetings is taken as it was recorded, but for what is left out. A meeting
is as late as the last rank that comes to it, and each rank leaves it as long after that as it did.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

# What can be left out: phases, and the time in collectives after the last rank has come.
REMOVABLE = ("data", "collectives", "save", "other", "transfer")


class RankParts(NamedTuple):
    """What one rank does in a step between its meetings with the others, in nanoseconds."""

    start: int
    stop: int
    alone: Sequence[int]  # the time before each meeting, and after the last one
    phases: Mapping[str, Sequence[int]]  # how much of that is removable
    after: Sequence[int]  # by meeting, from when the last rank came until this one goes on


class Replay:
    """Takes steps in their order; what one begins late because of another is made up for, too."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._stops = list[int]()  # of the step before, as it was recorded
        self._clocks: dict[str, list[int]] = {}  # and without something

    def without_meetings(self) -> list[dict[str, int]]:
        """Take a step in which ranks met nobody knows where, so that nothing can be told."""
        self._stops = []
        return [{} for _ in range(self._num_ranks)]

    def without(self, ranks: Sequence[RankParts]) -> list[dict[str, int]]:
        """Return, by rank, how much shorter a step were without what is removable."""
        starts = [rank.start for rank in ranks]
        goes_on = starts == self._stops
        saved: list[dict[str, int]] = [{} for _ in ranks]
        for what in REMOVABLE:
            begins = self._clocks[what] if goes_on else starts
            ends = self._clocks[what] = _replayed(ranks, begins, what)
            for rank, begin, end, less in zip(ranks, begins, ends, saved, strict=True):
                if shorter := rank.stop - rank.start - (end - begin):
                    less[what] = shorter
        self._stops = [rank.stop for rank in ranks]
        return saved


def _replayed(ranks: Sequence[RankParts], begins: Sequence[int], what: str) -> list[int]:
    now = [*begins]
    for index in range(len(ranks[0].alone)):
        if index:
            came = max(now)
            after = [rank.after[index - 1] for rank in ranks]
            now = [came + (min(0, each) if what == "transfer" else each) for each in after]
        now = [
            time + rank.alone[index] - rank.phases[what][index]
            for time, rank in zip(now, ranks, strict=True)
        ]
    return now
