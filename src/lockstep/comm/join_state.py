"""Who still has data: ranks that ask each other before everything that they do together.

In a loop of different length on each rank, those that are through go on taking part, with zeros, in
what the others do. For that they have to know what it is: before each collective of a step every
rank says what comes next, and those that are through say that they are.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Sequence
from enum import IntEnum
from typing import NamedTuple

import torch
import torch.distributed as dist

from lockstep.comm.exchange import all_gather, start_all_reduce
from lockstep.errors import CollectiveFailed


class Step(IntEnum):
    """What a rank is about to do."""

    THROUGH = 0  # it has no more data: whatever the others do
    BEGIN = 1  # begin a backward of the engines whose bits are set
    END = 2  # reduce their gradients
    GATHER = 3  # all-gather so many elements of float64
    SUM = 4  # all-reduce so many elements of float64
    NOTHING = 5  # go on to the next forward, without having reduced anything


class Announcement(NamedTuple):
    """What the roll call brought.

    Attributes:
        active: The ranks that are not through, in ascending order.
        step: What they are about to do; THROUGH if there are none.
        detail: A number that goes with it.
    """

    active: Sequence[int]
    step: Step
    detail: int


class JoinState:
    """The roll of one group, while its ranks' loops may end at different times.

    Attributes:
        is_active: Whether this rank still has data.
        mean_divisor: By how many ranks sums are divided to get means.
        last_active: Those ranks that weren't through when the roll was last called, or that were
            the last not to be.

    Args:
        group: The ranks.
        device: Of a kind whose tensors the group can carry.
        divide_by_active: Whether ranks that are through don't count in means.
        throws: Whether the first rank that is through ends it for all.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        divide_by_active: bool = False,
        throws: bool = False,
    ) -> None:
        self.is_active = True
        self.mean_divisor = group.size()
        self.last_active: Sequence[int] = range(group.size())
        self._group = group
        self._device = device
        self._divide_by_active = divide_by_active
        self._throws = throws
        self._members: list[int] = []

    def add(self, numbers: Iterable[int]) -> None:
        """Let engines of these numbers, in the same order on every rank, be spoken of."""
        self._members += numbers

    def mask(self, numbers: Collection[int]) -> int:
        """What stands for the engines of these numbers in a call.

        Raises:
            CollectiveFailed: If one of them hasn't joined.
        """
        if not set(self._members).issuperset(numbers):
            raise CollectiveFailed(
                "A model is trained in join() that hasn't joined, so ranks that are through know "
                "nothing of it. Let all models join that the loop trains."
            )
        return sum(1 << place for place, number in enumerate(self._members) if number in numbers)

    def unmask(self, mask: int) -> list[int]:
        """The numbers of the engines that ``mask`` stands for."""
        return [number for place, number in enumerate(self._members) if mask >> place & 1]

    def call(self, step: Step, detail: int = 0) -> Announcement:
        """Say what this rank is about to do, and hear what all are. Every rank must call it.

        Raises:
            RuntimeError: If a rank is through, and that is to end it for all.
            CollectiveFailed: If those that are not through are about to do different things.
        """
        self.is_active = step is not Step.THROUGH
        said = torch.tensor([step, detail], device=self._device)
        heard = [tuple(row.tolist()) for row in all_gather(self._group, said)]
        active = [rank for rank, row in enumerate(heard) if row[0] != Step.THROUGH]
        if not active:
            return Announcement(active, Step.THROUGH, 0)
        self.last_active = active
        if self._throws and len(active) < len(heard):
            through = [rank for rank in range(len(heard)) if rank not in active]
            raise RuntimeError(
                f"Rank {through[0]} has exhausted its inputs, which ends the loop on every rank."
            )
        if len({heard[rank] for rank in active}) > 1:
            steps = ", ".join(f"rank {rank}: {Step(heard[rank][0]).name}" for rank in active)
            raise CollectiveFailed(
                "Ranks that still have data do different things, one after the other, in join(): "
                f"{steps}. They must run the same model in the same way."
            )
        if self._divide_by_active:
            self.mean_divisor = len(active)
        kind, agreed = heard[active[0]]
        return Announcement(active, Step(kind), agreed)

    def follow(self, answer: Announcement) -> None:
        """Take part, with zeros, in a collective that the others are about to run."""
        zeros = torch.zeros(answer.detail, dtype=torch.float64, device=self._device)
        if answer.step is Step.GATHER:
            all_gather(self._group, zeros)
        elif answer.step is Step.SUM:
            start_all_reduce(self._group, zeros).wait()


# The rolls that are being called. They belong to whom joins, and are gone when that is.
_rolls: weakref.WeakKeyDictionary[dist.ProcessGroup, weakref.ref[JoinState]] = (
    weakref.WeakKeyDictionary()
)


def join_state_of(group: dist.ProcessGroup) -> JoinState | None:
    """The roll to call before a step of ``group``; None outside of join()."""
    reference = _rolls.get(group)
    return reference() if reference is not None else None


def set_join_state(group: dist.ProcessGroup, roll: JoinState | None) -> None:
    """Call ``roll`` from now on before each step of ``group``, or no more."""
    if roll is None:
        _rolls.pop(group, None)
    elif join_state_of(group) is not None:
        raise CollectiveFailed(
            "join() is entered in another join() over the same ranks. Let all models join at once: "
            "with lockstep.join(first, second), or torch.distributed.algorithms.Join([...])."
        )
    else:
        _rolls[group] = weakref.ref(roll)


def gather_in_step(group: dist.ProcessGroup, tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return each rank's ``tensor``, of float64, in rank order; zeros of those that are through."""
    if (roll := join_state_of(group)) is not None:
        roll.call(Step.GATHER, tensor.numel())
    return all_gather(group, tensor)


def sum_in_step(group: dist.ProcessGroup, tensor: torch.Tensor) -> None:
    """Add up ``tensor``, of float64, over the ranks, in place; who is through adds nothing."""
    if (roll := join_state_of(group)) is not None:
        roll.call(Step.SUM, tensor.numel())
    start_all_reduce(group, tensor.view(-1)).wait()


def mean_divisor(group: dist.ProcessGroup) -> int:
    """By how many ranks sums over ``group`` are divided to get means."""
    roll = join_state_of(group)
    return group.size() if roll is None else roll.mean_divisor
