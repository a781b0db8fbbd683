"""Shares of the ranks in a batch that follow from how fast they were."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from lockstep.arguments import as_whole_number, refusal
from lockstep.comm import all_gather, device_of_facts, waited_seconds
from lockstep.errors import SplitError

# The number of batches after which the ranks compare how long they took.
_INTERVAL = 8
# The shares of all ranks together; each has one at least.
_NUM_SHARES = 256


class Pace:
    """Shares in proportion to the samples that each rank computes in a second.

    Ranks agree on new shares after every few batches. New shares count from the batch on that is
    ``ahead`` of the last one given, for which no rank's workers can have been asked yet.
    """

    def __init__(self, group: dist.ProcessGroup | None, ahead: int) -> None:
        self._group, self.ahead = group, ahead
        size = 1 if group is None else group.size()
        self._shares, self._later = (1,) * size, (0, (1,) * size)
        self._speeds = [0.0] * size
        self._seconds, self._num_samples = 0.0, 0

    def restart(self) -> None:
        """An epoch begins."""
        self._later = 0, self._later[1]

    def shares_at(self, number: int) -> tuple[int, ...]:
        """Return the shares in the batch of that number of the epoch."""
        return self._later[1] if number >= self._later[0] else self._shares

    def begin(self) -> None:
        """Note the time at which the program is given a batch."""
        self._began = time.perf_counter() - waited_seconds()

    def end(self, number: int, num_samples: int) -> None:
        """Note that the program has done with batch ``number``, from 1, of ``num_samples``."""
        self._seconds += time.perf_counter() - waited_seconds() - self._began
        self._num_samples += num_samples
        # While new shares are still to come, batches may have been cut by them on some ranks.
        if self._group is None or number % _INTERVAL or number < self._later[0]:
            return
        local_times = torch.tensor(
            [self._num_samples / max(self._seconds, 1e-9)],
            dtype=torch.float32,
            device=device_of_facts(self._group),
        )
        self._seconds, self._num_samples = 0.0, 0
        speeds = [float(each) for each in all_gather(self._group, local_times)]
        # A rank without samples was not measured.
        pairs = zip(speeds, self._speeds, strict=True)
        self._speeds = [(new + (old or new)) / 2 if new else old for new, old in pairs]
        if not all(self._speeds):
            return
        total = sum(self._speeds)
        shares = tuple(max(1, round(_NUM_SHARES * speed / total)) for speed in self._speeds)
        self._shares, self._later = self._later[1], (number + self.ahead, shares)


def checked_shares(shares: Any, num_ranks: int) -> tuple[int, ...]:
    """Return ``shares`` as a tuple with one for each rank, of which not all are 0."""
    wanted = f"'auto' or {num_ranks} whole numbers, one for each rank, such as [3, 1]"
    if isinstance(shares, str) or not isinstance(shares, Sequence):
        raise TypeError(refusal("shares", shares, wanted))
    checked = tuple(as_whole_number("shares", share, wanted) for share in shares)
    fits = len(checked) == num_ranks or (num_ranks == 1 and checked)
    if not fits or min(checked) < 0 or not any(checked):
        raise SplitError(f"shares is {list(shares)}; needed is {wanted}, and not all of them 0.")
    return checked if num_ranks > 1 else (1,)
