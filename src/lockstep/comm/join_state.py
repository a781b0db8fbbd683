"""Uneven inputs: ranks announce each collective of a step, so that those without data take part.

In a loop of different length on each rank, ranks that have finished go on taking part, with
zeros, in the others' collectives. To know which those are, every rank announces its next one before
each collective of a step, and ranks that have finished announce that.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from lockstep.comm.any_group import all_gather
from lockstep.comm.context import context_of
from lockstep.comm.started import start_all_reduce
from lockstep.errors import CollectiveFailed


class Announced(IntEnum):
    """What a rank does next."""

    FINISHED = 0  # no more data: take part in the steps of the others
    BEGIN = 1  # begin a backward of the engines whose bits are set
    END = 2  # reduce their gradients
    GATHER = 3  # all-gather that many elements of float64
    SUM = 4  # all-reduce that many elements of float64
    NOTHING = 5  # go on to the next forward without having reduced anything
    UPDATE = 6  # take a step of the sharded optimizer of that number


class Announcement(NamedTuple):
    """What the ranks do next, all the same."""

    active: Sequence[int]  # the ranks that still have data, in ascending order
    kind: Announced  # what they do; FINISHED if there are none
    detail: int  # a mask of engines, a number of elements or of an optimizer, by the kind


class JoinState:
    """The state of a group while its ranks' loops may end at different times.

    Args:
        group: The ranks.
        device: A device whose tensors the group can carry.
        divide_by_active: Whether ranks without data don't count in means.
        throws: Whether the first rank that has finished ends the loop for all.

    Attributes:
        follows_updates: Whether ranks without data take steps of sharded optimizers.
    """

    follows_updates = True

    def __init__(
        self,
        group: ProcessGroup,
        device: torch.device,
        *,
        divide_by_active: bool = False,
        throws: bool = False,
    ) -> None:
        self.is_active = True  # whether this rank still has data
        self.mean_divisor = group.size()  # the number by which sums are divided to get means
        # The ranks that had data when any last had.
        self.last_active: Sequence[int] = range(group.size())
        self._group, self._device = group, device
        self._divide_by_active, self._throws = divide_by_active, throws
        self._members: list[Any] = []  # the engines that join, by bit of the mask

    def mask(self, engines: Collection[object]) -> int:
        """Return a bit mask of ``engines``, for announcements.

        Raises:
            CollectiveFailed: If one of them hasn't joined.
        """
        if not set(self._members).issuperset(engines):
            raise CollectiveFailed(
                "A model is trained in join() that hasn't joined, so ranks that are through know "
                "nothing of it. Let all models join that the loop trains."
            )
        return sum(1 << bit for bit, engine in enumerate(self._members) if engine in engines)

    def call(self, kind: Announced, detail: int = 0) -> Announcement:
        """Announce what this rank does next; return what all do. All ranks must call it; it blocks.

        Raises:
            RuntimeError: If a rank has finished, and that is to end the loop for all.
            CollectiveFailed: If the ranks that still have data announce different ones.
        """
        self.is_active = kind is not Announced.FINISHED
        local = torch.tensor([kind, detail], device=self._device)
        told = [tuple(theirs.tolist()) for theirs in all_gather(self._group, local)]
        active = [rank for rank, (one, _) in enumerate(told) if one != Announced.FINISHED]
        if not active:
            return Announcement(active, Announced.FINISHED, 0)
        self.last_active = active
        if self._throws and len(active) < len(told):
            through = min(set(range(len(told))) - set(active))
            raise RuntimeError(
                f"Rank {through} has exhausted its inputs, which ends the loop on every rank."
            )
        if len({told[rank] for rank in active}) > 1:
            described = ", ".join(
                f"rank {rank}: {Announced(told[rank][0]).name}" for rank in active
            )
            raise CollectiveFailed(
                "Ranks that still have data do different things, one after the other, in join(): "
                f"{described}. They must run the same model in the same way."
            )
        if self._divide_by_active:
            self.mean_divisor = len(active)
        common, number = told[active[0]]
        return Announcement(active, Announced(common), number)

    def follow(self, announcement: Announcement) -> None:
        """Take part, with zeros, in the collective that the others have announced."""
        zeros = torch.zeros(announcement.detail, dtype=torch.float64, device=self._device)
        if announcement.kind is Announced.GATHER:
            all_gather(self._group, zeros)
        elif announcement.kind is Announced.SUM:
            start_all_reduce(self._group, zeros).wait()

    def follow_update(self, announcement: Announcement) -> None:
        """Take the step of a sharded optimizer that the others have announced."""
        follow_update(self._group, announcement.detail, announcement.active[0])


# Takes a step along with other ranks of a group; with the options and gradients of a rank, if any.
Update = Callable[[ProcessGroup, int | None], None]


class _Joining:
    """What belongs to ``join()`` in a group's context."""

    def __init__(self) -> None:
        # Belongs to the context that has been entered, and ends with it.
        self.state: weakref.ref[JoinState] | None = None
        # The sharded optimizers', in the order in which all ranks have made them.
        self.updates: list[weakref.WeakMethod[Update]] = []


def add_update(group: ProcessGroup, update: Update) -> int:
    """Return the number by which ranks of ``group`` announce this ``update``, a method."""
    updates = context_of(group).get(_Joining).updates
    updates.append(weakref.WeakMethod(update))
    return len(updates) - 1


def num_updates(group: ProcessGroup) -> int:
    """Return how many updates have been added."""
    joining = context_of(group).find(_Joining)
    return 0 if joining is None else len(joining.updates)


def follow_update(group: ProcessGroup, number: int, first: int | None) -> None:
    """Take the step of a sharded optimizer that other ranks take.

    Args:
        group: The ranks.
        number: That of the update.
        first: The rank whose options and gradients count; None for those of this rank.
    """
    update = context_of(group).get(_Joining).updates[number]()
    if update is None:
        raise CollectiveFailed(
            "Other ranks take a step of a sharded optimizer that this rank has dropped. It has to "
            "take part, as it has no more data in join(), or has caught the error of a backward. "
            "Keep the optimizer until the end of the loop."
        )
    update(group, first)


def join_state_of(group: ProcessGroup) -> JoinState | None:
    """Return the state of the ``join()`` of ``group``; None outside of join()."""
    joining = context_of(group).find(_Joining)
    return joining.state() if joining is not None and joining.state is not None else None


def set_join_state(group: ProcessGroup, state: JoinState | None) -> None:
    """Announce collectives of ``group`` to ``state`` from now on; None: no more.

    Raises:
        CollectiveFailed: If there is another one already.
    """
    joining = context_of(group).get(_Joining)
    if state is None:
        joining.state = None
    elif join_state_of(group) is not None:
        raise CollectiveFailed(
            "join() is entered in another join() over the same ranks. Let all models join at once: "
            "with lockstep.join(first, second), or torch.distributed.algorithms.Join([...])."
        )
    else:
        joining.state = weakref.ref(state)


def gather_announced(group: ProcessGroup, tensor: Tensor) -> list[Tensor]:
    """Return each rank's ``tensor``, of float64, in rank order; zeros for ranks without data.

    Every rank that has data must call it, with tensors of one shape; it blocks.
    """
    _announce(group, Announced.GATHER, tensor)
    return all_gather(group, tensor)


def sum_announced(group: ProcessGroup, tensor: Tensor) -> None:
    """Add up ``tensor``, of float64, over the ranks, in place, as :func:`gather_announced`."""
    _announce(group, Announced.SUM, tensor)
    start_all_reduce(group, tensor.view(-1)).wait()


def _announce(group: ProcessGroup, kind: Announced, tensor: Tensor) -> None:
    if (state := join_state_of(group)) is not None:
        state.call(kind, tensor.numel())


def mean_divisor(group: ProcessGroup) -> int:
    """Return the number of ranks by which sums over ``group`` are divided to get means."""
    state = join_state_of(group)
    return group.size() if state is None else state.mean_divisor
