"""Facts: what ranks tell each other of a backward, behind the gradients of its last bucket.

They are numbers that are summed over the ranks, as the gradients are: for each parameter, by
position, 1 if its gradient has grown on a rank; then on how many ranks the backward has failed; and
the sum of the numbers of these ranks. Where none has failed, fractions in the last two tell more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from lockstep.comm import without_wait

_NUM_FAILURE_FACTS = 2


def num_facts(num_parameters: int) -> int:
    """Return the number of elements of the facts."""
    return num_parameters + _NUM_FAILURE_FACTS


class Flags(NamedTuple):
    """Two facts that a rank, or any rank, tells in fractions.

    Attributes:
        is_watched: Whether the program may see gradients past ``parameter.grad``.
        is_to_tell: Whether the reducer's caller has something to tell.
    """

    is_watched: bool
    is_to_tell: bool


def write_facts(
    tail: torch.Tensor,
    accumulated: bytearray,
    flags: Flags,
    *,
    failed_rank: int | None,
    num_ranks: int,
) -> None:
    """Write to ``tail`` which gradients have grown here, or that the backward of this rank failed.

    The sum of a fraction over the ranks is less than 1/2.
    """
    numbers: Sequence[float] = [fact / 4 / num_ranks for fact in flags]
    if failed_rank is not None:
        numbers = [1, failed_rank]
    used, failures = tail[:-_NUM_FAILURE_FACTS], tail[-_NUM_FAILURE_FACTS:]
    for facts, values in (used, accumulated), (failures, numbers):
        if len({*values}) < 2:  # as in most steps
            facts.fill_(next(iter(values), 0))
        else:
            facts.copy_(without_wait(torch.tensor([*values]), facts.device))


class Facts:
    """The facts of all ranks.

    On a GPU failures aren't read, which would wait for it: there are none then, and the gradients
    of a failed rank were NaN (or 0 for a communication hook, which may keep them for later steps).

    Args:
        tail: The sums, divided by ``divisor``.
        divisor: The number of ranks, if the reduction has averaged; otherwise 1.

    Attributes:
        num_failed: On how many ranks the backward has failed.
        sum_of_failed: The sum of the numbers of these ranks.
    """

    def __init__(self, tail: torch.Tensor, divisor: int) -> None:
        self._tail = tail
        self._failures: list[float] | None = None
        self.num_failed = self.sum_of_failed = 0
        if tail.device.type == "cpu":
            facts = tail[-_NUM_FAILURE_FACTS:]
            self._failures = (facts.real if facts.is_complex() else facts).tolist()
            self.num_failed, self.sum_of_failed = (round(n * divisor) for n in self._failures)

    def flags(self, on_gpu: Flags) -> Flags:
        """Return those of any rank; on a GPU, where they aren't read, ``on_gpu``."""
        return on_gpu if self._failures is None else Flags(*(n != 0 for n in self._failures))

    def used_by_any(self) -> Sequence[float]:
        """Return for each position a number above 0 if any rank had a gradient; waits for a GPU."""
        used: list[float] = self._tail[:-_NUM_FAILURE_FACTS].tolist()
        return used
