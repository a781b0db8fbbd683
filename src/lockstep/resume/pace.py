"""When the ranks tell each other of signals, and when they take snapshots: as often as is cheap."""

from __future__ import annotations

import math
import time
from collections import deque
from typing import Any, NamedTuple

import torch

from lockstep.comm import ALONE, all_gather, device_of_facts
from lockstep.nn import finish_failed

# Of a run's time: for snapshots, so that a replay takes 50 times as long as one on average, and for
# exchanges between the ranks.
_SNAPSHOT_PART, _EXCHANGE_PART = 0.01, 0.003
_LONGEST_SECONDS = 1.0  # between two exchanges
_NUM_TIMES = 9
_WARM_UP_STEPS = 3


class Agreed(NamedTuple):
    """What the ranks agree on at a step's end."""

    stops: bool  # a rank was asked to stop
    grows: bool  # the same, as more hosts have come
    saves: bool  # it is time for a checkpoint
    fails: bool  # a rank can't take snapshots
    is_torn: bool  # a rank's last snapshot was changed while it was copied
    accumulates: bool  # a rank has gradients that the next step adds to
    snapshot_every: int
    exchange_every: int


class SnapshotPace:
    """Measures steps, snapshots and exchanges of this rank, and asks the others.

    Args:
        group: The ranks.
        snapshot_every: The steps between two snapshots; None to have it chosen.
    """

    def __init__(self, group: Any, snapshot_every: int | None) -> None:
        self._group, self._snapshot_every = group, snapshot_every
        self._step_seconds = deque[float](maxlen=_NUM_TIMES)
        self._exchange_seconds = deque[float](maxlen=_NUM_TIMES)
        self._snapshot_seconds = deque[float](maxlen=3)
        self._began: float | None = None

    def begin_step(self) -> None:
        """Note when a step begins."""
        self._began = time.perf_counter()

    def end_step(self) -> None:
        """Note when it ends."""
        if self._began is not None:
            self._step_seconds.append(time.perf_counter() - self._began)

    def took_snapshot(self, seconds: float) -> None:
        """Note how long a snapshot took."""
        self._snapshot_seconds.append(seconds)

    def exchange(self, **facts: bool) -> Agreed:
        """Return what holds on any rank. Every rank calls it, after the same step; it blocks."""
        mine = Agreed(
            **facts, snapshot_every=self._next_snapshot(), exchange_every=self._next_exchange()
        )
        if self._group is ALONE:
            return mine
        finish_failed(self._group)
        start = time.perf_counter()
        local = torch.tensor(mine, dtype=torch.int64, device=device_of_facts(self._group))
        every = zip(*(each.tolist() for each in all_gather(self._group, local)), strict=True)
        self._exchange_seconds.append(time.perf_counter() - start)
        most = [*map(max, every)]
        return Agreed(*map(bool, most[:-2]), *most[-2:])

    def _step(self) -> float:
        # The least here too: other load prolongs some steps, and all else that is measured.
        return max(1e-6, min(self._step_seconds)) if self._step_seconds else 1.0

    def _next_snapshot(self) -> int:
        if self._snapshot_every is not None:
            return self._snapshot_every
        if len(self._step_seconds) < _WARM_UP_STEPS or not self._snapshot_seconds:
            return 1
        # The least: the first ones take memory. Before each the ranks tell each other of it.
        seconds = min(self._snapshot_seconds) + min(self._exchange_seconds, default=0.0)
        return max(1, math.ceil(seconds / (_SNAPSHOT_PART * self._step())))

    def _next_exchange(self) -> int:
        if len(self._step_seconds) < _WARM_UP_STEPS or not self._exchange_seconds:
            return 1
        # The least, as it has no wait for a rank that comes late.
        wanted = math.ceil(min(self._exchange_seconds) / (_EXCHANGE_PART * self._step()))
        return max(1, min(wanted, int(_LONGEST_SECONDS / self._step())))
