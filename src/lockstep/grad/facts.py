"""Facts: what ranks tell each other of a backward, behind the gradients of its last bucket.

They are numbers that are summed over the ranks, as the gradients are: for each parameter, by
position, 1 if its gradient has grown on a rank; then on how many ranks the backward has failed; and
the sum of the numbers of these ranks. Where none has failed, fractions tell more.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from enum import Enum, auto
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


class WhoTold(Enum):
    """Which ranks are known to have told something in a backward, whatever that is."""

    NOBODY = auto()  # as far as this rank knows
    ALL = auto()  # all ranks know that some have, or all have
    THIS_RANK = auto()  # it has, on a device, and not all others know of it yet


def write_facts(
    tail: torch.Tensor,
    accumulated: bytearray,
    flags: Flags,
    *,
    failed_rank: int | None,
    num_ranks: int,
) -> None:
    """Write to ``tail`` which gradients have grown here, or that the backward of this rank failed.

    The sum of a fraction over the ranks is less than 1/2. On a GPU, where no gradients are watched,
    the first tells that this rank has nothing to tell: whether all have can't be seen from the sum
    of the second, which is rounded.
    """
    first = flags.is_watched if tail.device.type == "cpu" else not flags.is_to_tell
    numbers: Sequence[float] = [fact / 4 / num_ranks for fact in (first, flags.is_to_tell)]
    if failed_rank is not None:
        numbers = [1, failed_rank]
    used, failures = tail[:-_NUM_FAILURE_FACTS], tail[-_NUM_FAILURE_FACTS:]
    for places, values in (used, accumulated), (failures, numbers):
        if len({*values}) < 2:  # as in most steps
            places.fill_(next(iter(values), 0))
        else:
            places.copy_(without_wait(torch.tensor([*values]), places.device))


class Facts:
    """The facts of all ranks.

    On a GPU failures aren't read, which would wait for it: there are none then, and the gradients
    of a failed rank were NaN (or 0 for a communication hook, which may keep them for later steps).
    :class:`Heard` hears of them later.

    Args:
        tail: The sums, divided by ``divisor``.
        divisor: The number of ranks, if the reduction has averaged; otherwise 1.

    Attributes:
        divisor: The same.
        num_failed: On how many ranks the backward has failed.
        sum_of_failed: The sum of the numbers of these ranks.
        is_watched: Whether any rank's :attr:`Flags.is_watched` is true.
        told: Which ranks are known to have told something.
    """

    def __init__(self, tail: torch.Tensor, divisor: int) -> None:
        self._tail, self.divisor = tail, divisor
        self.num_failed = self.sum_of_failed = 0
        self.is_watched, self.told = False, WhoTold.NOBODY
        if tail.device.type == "cpu":
            first, second = _read(self.failures)
            self.num_failed, self.sum_of_failed = round(first * divisor), round(second * divisor)
            self.is_watched = first != 0
            self.told = WhoTold.ALL if second else WhoTold.NOBODY

    @property
    def failures(self) -> torch.Tensor:
        """The two facts behind those of the parameters."""
        return self._tail[-_NUM_FAILURE_FACTS:]

    def used_by_any(self) -> Sequence[float]:
        """Return for each position a number above 0 if any rank had a gradient; waits for a GPU."""
        used: list[float] = self._tail[:-_NUM_FAILURE_FACTS].tolist()
        return used


def _read(failures: torch.Tensor) -> list[float]:
    numbers: list[float] = (failures.real if failures.is_complex() else failures).tolist()
    return numbers


class Heard:
    """What this rank has heard of others in earlier backwards, if facts are on a device.

    The host copies them to its memory, doesn't wait, and looks at them in a later backward, when
    they have come; that is another one on each rank. A rank that has heard that one tells something
    tells that too. Ranks that tell read the facts, and wait for the device, until all ranks tell:
    that is in the same backward for all of them. So the host waits in no other backward.

    A backward that has failed on another rank is told in the same way, by all that hear of it.
    Shown by test_a_backward_that_fails_on_one_rank_and_is_caught_is_named_on_all.

    Attributes:
        is_told: Whether any rank is known to have told something, and not all ranks know of it.
        failed: The first failed backward that is heard of: on how many ranks, and the sum of their
            numbers.
    """

    def __init__(self) -> None:
        self.is_told = False
        self.failed: tuple[int, int] | None = None
        # Copied facts, with their divisor, and what tells that they have come, until they are seen.
        self._copy: torch.Tensor | None = None
        self._divisor = 1
        self._event: torch.Event | None = None

    def look(self) -> bool:
        """Look at facts of an earlier backward if they have come; return :attr:`is_told`."""
        event, copied = self._event, self._copy
        if event is None or copied is None or _is_capturing(event.device) or not event.query():
            return self.is_told
        self._event = None
        first, second = _read(copied)
        if not self._has_failed(first, second, self._divisor):
            self.is_told |= second != 0
        return self.is_told

    def settle(self) -> None:
        """Wait for the facts of an earlier backward, and look at them."""
        if self._event is not None and not _is_capturing(self._event.device):
            self._event.synchronize()
            self.look()

    def forget(self, failed: tuple[int, int] | None) -> None:
        """Be as before a step that all ranks have left out: ``failed`` was heard of by then."""
        self.failed, self._event = failed, None

    def _has_failed(self, first: float, second: float, divisor: int) -> bool:
        """Whether a backward with these facts has failed on a rank, which is noted."""
        if first * divisor < 1 / 2:
            return False
        self.failed = self.failed or (round(first * divisor), round(second * divisor))
        self.is_told = True
        return True

    def hear(self, facts: Facts, *, tells: bool) -> WhoTold:
        """Return which ranks have told something, by the ``facts`` of a backward."""
        failures = facts.failures
        if failures.device.type == "cpu":
            return facts.told
        if _is_capturing(failures.device):
            return WhoTold.NOBODY
        if not tells:
            if self._event is None:
                self._copy_from(failures, facts.divisor)
            return WhoTold.NOBODY
        first, second = _read(failures)
        if self._has_failed(first, second, facts.divisor):  # and that rank has told nothing
            return WhoTold.NOBODY
        self.is_told = first != 0  # not by all
        if self.is_told:
            return WhoTold.THIS_RANK
        self._event = None
        return WhoTold.ALL

    def _copy_from(self, failures: torch.Tensor, divisor: int) -> None:
        if self._copy is None:
            self._copy = torch.empty_like(failures, device="cpu")
            with contextlib.suppress(RuntimeError):  # not every kind of accelerator pins memory
                self._copy = self._copy.pin_memory()
        self._copy.copy_(failures, non_blocking=True)
        self._divisor = divisor
        self._event = torch.accelerator.current_stream(failures.device).record_event()


def _is_capturing(device: torch.device) -> bool:
    """Whether a graph of the device's work is captured: nothing can be read or asked then."""
    module = torch.get_device_module(device) if device.type != "cpu" else None
    return bool(getattr(module, "is_current_stream_capturing", bool)())
