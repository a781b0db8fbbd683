"""What ranks do after a backward over GPUs, told to a rank on which that backward has failed.

No host waits for a GPU. So ranks on which a backward succeeds go on, with the step of a sharded
optimizer say, while the program of a rank on which it has failed may catch the error, and leave
that out: from then on their collectives wouldn't match. So each rank leaves in the group's store
what it does next, which waits for no answer; and a rank on which a backward has failed does that
too. Shown by test_a_backward_that_fails_on_one_rank_and_is_caught_is_named_on_all.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist

from lockstep.comm import (
    STORE_SECONDS,
    Announced,
    all_gather,
    answered,
    carrier,
    device_of_facts,
    follow_update,
    global_rank,
    is_agreed,
    num_updates,
    start_all_reduce,
    timeout_of,
)
from lockstep.deadline import Deadline
from lockstep.entries import value_in
from lockstep.errors import CollectiveFailed
from lockstep.world import device_of_sums

_Answer = TypeVar("_Answer")

# Of how many backwards a rank tells: others may be as far ahead of one that has failed.
_NUM_KEPT = 32
_POLL_SECONDS = 0.05
# For which part of the time that a collective may take ranks wait for each other in the store. The
# rest is for a backward of those that came, in which the others wait on their GPUs already.
_PART_OF_TIME = 0.9


class Call(NamedTuple):
    """Collectives over a group that its ranks call after a backward, and before the next one.

    Attributes:
        kind: What, and NOTHING for all that a failed backward doesn't leave out.
        detail: The number of an UPDATE, or of elements to GATHER; how often two elements of norms
            are added up in a SUM.
    """

    kind: Announced
    detail: int = 0


OTHERS = Call(Announced.NOTHING)
# What a rank has called after each of its last backwards, by number; None if that has failed.
_Told = dict[int, list[Call] | None]


class AfterBackward:
    """What the ranks of one group call after each backward over GPUs, as they tell each other.

    Args:
        group: The ranks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._weak_group = weakref.ref(group)
        self._store: dist.Store | None = None
        with suppress(Exception):  # not every group tells of its store
            self._store = dist.PrefixStore("lockstep/after", group.get_group_store())
        self._rank, self._number, self._told = group.rank(), 0, _Told({0: []})
        # After a backward that has failed, how many of the others' calls this rank has called too.
        self._num_followed: int | None = None
        self._has_told = False
        # Where ranks have last met in the store, and how often they have before at this place.
        self._place, self._num_met = (0, 0), 0

    @property
    def _group(self) -> dist.ProcessGroup:
        group = self._weak_group()
        assert group is not None  # callers hold it
        return group

    def backward_ended(self, *, has_failed: bool) -> None:
        """Note that a backward has ended on all ranks."""
        self._number += 1
        self._told[self._number] = None if has_failed else []
        self._told.pop(self._number - _NUM_KEPT, None)
        is_followed = has_failed and self._is_used() and not is_agreed(self._group)
        self._num_followed = 0 if is_followed else None
        if self._num_followed is not None:
            self._tell()

    def _is_used(self) -> bool:
        return self._has_told or num_updates(self._group) > 0

    def is_next(self, call: Call = OTHERS) -> None:
        """Tell the other ranks of ``call`` before it; after a failed backward, do as they do.

        In a guarded step ranks agree on each call anyhow.

        Raises:
            CollectiveFailed: If the backward has failed, and no other rank tells what it calls.
        """
        if is_agreed(self._group):
            return
        if (number := self._num_followed) is not None:
            self._num_followed = None  # meanwhile what it calls isn't the program's
            self._num_followed = self._follow(number, call)
        called = self._told[self._number]
        is_known = call != OTHERS or self._is_used()
        if is_known and called is not None and not self._is_last(called):
            called.append(call)
            self._has_told = True
            self._tell()

    def _is_last(self, called: Sequence[Call]) -> bool:
        """Whether nothing comes behind ``called`` that a failed backward leaves out."""
        if not called:
            return False
        is_step = called[-1].kind is Announced.UPDATE and num_updates(self._group) == 1
        return is_step or called[-1] == OTHERS

    def _tell(self) -> None:
        try:
            if self._store is not None:
                self._store.set(str(self._rank), json.dumps(self._told))
        except RuntimeError:
            self._store = None

    def late_ranks(self, number: int) -> list[int]:
        """Wait until all ranks have called this; return those that haven't in time, as they all do.

        A collective that one rank alone calls would meet those of the others' backward, and NCCL
        compares nothing. Shown by test_a_change_of_one_rank_alone_is_named_on_all.

        Args:
            number: That of the engine, in whose order ranks come.
        """
        place = self._number, number
        self._num_met = self._num_met + 1 if self._place == place else 0
        self._place = place
        try:
            if self._store is not None and not is_agreed(self._group):
                key = f"{self._number}/{number}/{self._num_met}"
                return _late(dist.PrefixStore(key, self._store), self._group)
        except RuntimeError:
            self._store = None
        return []

    def _follow(self, number: int, call: Call) -> int | None:
        """Call what others do behind the first ``number`` calls, until that is ``call``.

        Returns the number of calls then; None if nothing comes behind them that is left out.
        """
        called: list[Call] = []
        while not self._is_last(called):
            called = self._others_called(number + 1)[: number + 1]
            if len(called) <= number or called[-1] == OTHERS:
                break
            number += 1
            is_sum = called[-1].kind is call.kind is Announced.SUM
            is_same = is_sum or called[-1] == call
            if not is_same or is_sum:  # the gradients are gone of which this rank would take norms
                self._take_part(called[-1])
            if is_same:
                return None if self._is_last(called) else number
        return None

    def _others_called(self, number: int) -> list[Call]:
        """Return what other ranks have called, at least ``number``; less if all have failed."""
        found: list[Call] = []

        def is_known() -> bool:
            told = [told.get(self._number, []) for told in self._told_by_others()]
            each = [calls for calls in told if calls is not None]
            for calls in each:
                found[:] = calls if len(calls) > len(found) else found
            return not each or len(found) >= number

        seconds = timeout_of(self._group).total_seconds()  # after which NCCL gives up on a rank
        if not Deadline(seconds).until(is_known, _POLL_SECONDS):
            raise CollectiveFailed(
                f"A backward has failed on rank {self._rank}, whose program went on, and in "
                f"{seconds:g} s no other rank has told what it calls after it. Over GPUs "
                "ranks wait for each other then: let the error end the rank."
            )
        return found

    def _told_by_others(self) -> list[_Told]:
        others = [str(rank) for rank in range(self._group.size()) if rank != self._rank]

        def read(store: dist.Store) -> list[bytes]:
            return [store.get(rank) if store.check([rank]) else b"{}" for rank in others]

        if self._store is None:
            return [{self._number: None} for _ in others]
        texts = answered(partial(read, self._store), STORE_SECONDS)
        return [*map(_decoded, texts)]

    def _take_part(self, call: Call) -> None:
        """Take part in a call of the others, with zeros, or with this rank's parameters."""
        group = self._group
        if call.kind is Announced.UPDATE:
            follow_update(group, call.detail, None)
            return
        if call.kind is Announced.GATHER:
            numbers = torch.zeros(call.detail, dtype=torch.float64, device=device_of_facts(group))
            all_gather(group, numbers)
            return
        kinds = {device.type for device in group._device_types} - {"cpu"}
        device = torch.device(*kinds)
        dtype = torch.float64 if device_of_sums(device) == device else torch.float32
        for _ in range(call.detail):
            start_all_reduce(group, torch.zeros(2, dtype=dtype, device=device)).wait()


def _late(store: dist.Store, group: dist.ProcessGroup) -> list[int]:
    """Wait in ``store`` for all ranks of ``group``; return those that don't come in time."""
    keys = {str(rank): global_rank(group, rank) for rank in range(group.size())}

    def asked(call: Callable[..., _Answer], *arguments: object) -> _Answer:
        return answered(partial(call, *arguments), STORE_SECONDS)

    asked(store.set, str(group.rank()), "")
    seconds = _PART_OF_TIME * timeout_of(group).total_seconds()
    are_there = Deadline(seconds).until(lambda: asked(store.check, [*keys]), _POLL_SECONDS)
    # The first that says so has the last word, as others may come meanwhile.
    if asked(store.compare_set, "come", "", "all" if are_there else "not all") == b"all":
        return []
    late = [rank for key, rank in keys.items() if not asked(store.check, [key])]
    return late or [global_rank(group, group.rank())]


def ranks_on_gpus(group: dist.ProcessGroup) -> set[int]:
    """Return the ranks of ``group`` if GPUs run its collectives; the host runs those of Gloo."""
    devices = [device for device in getattr(group, "_device_types", ()) if device.type != "cpu"]
    if all(carrier(group, device) in (None, "gloo") for device in devices):
        return set()
    return {*dist.get_process_group_ranks(group)}


def _decoded(entry: bytes) -> _Told:
    try:
        return {int(number): calls and _calls(calls) for number, calls in value_in(entry).items()}
    except (AttributeError, TypeError, ValueError):  # no rank has written that
        return {}


def _calls(told: Sequence[Sequence[int]]) -> list[Call]:
    return [Call(Announced(kind), int(detail)) for kind, detail in told]
