"""In which order the reducers of one group launch, where a backward runs through several."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol


class Launches(Protocol):
    """What takes turns: a reducer."""

    def launch_full_buckets(self) -> bool:
        """Launch what is full; return whether only the last bucket is left."""
        ...


class LaunchOrder:
    """An order that doesn't depend on which gradients come first, which differs among ranks.

    A reducer launches before the end of the backward only when the one before it has nothing left
    but its last bucket. Last buckets follow at the end, in the same order. Shown by
    test_two_models_in_one_backward_launch_in_one_order.

    Args:
        reducers: Those that the backward runs through, in the same order on every rank.
    """

    def __init__(self, reducers: Iterable[Launches]) -> None:
        self.reducers: Sequence[Launches] = list(reducers)

    def launch_full_buckets(self) -> None:
        """Launch everything that is full and whose turn it is."""
        for reducer in self.reducers:
            if not reducer.launch_full_buckets():
                return
