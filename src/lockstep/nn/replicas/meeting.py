"""Where the replicas of one call add something up while they run, as ``lockstep.mean`` does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist

from lockstep.comm import num_counted, sum_in_step
from lockstep.nn.backward import refresh_stale
from lockstep.world import init

T = TypeVar("T")

Finish = Callable[[torch.Tensor], torch.Tensor]


class Meeting:
    """What the replicas of one call have in common.

    A replica that returns without coming, or fails, is waited for no more: it has nothing to add.

    Args:
        count: How many replicas there are.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._num_present = count
        self._changed = threading.Condition()
        self._waiting: _Round | None = None

    def add_up(self, replica: int, own: torch.Tensor, finish: Finish) -> torch.Tensor:
        """Return ``finish`` of the sum of all replicas' tensors, in the order of the replicas.

        Args:
            replica: Which one this is.
            own: What it has to add, of the same shape and dtype on all, on any device.
            finish: Is called once, in the thread of one of them.
        """
        with self._changed:
            if self._waiting is None:
                self._waiting = _Round(finish)
            mine = self._waiting
            mine.parts[replica] = own
            self._finish_if_all_have_come()
            self._changed.wait_for(lambda: mine.is_over)
        if mine.error is not None:
            raise mine.error
        assert mine.total is not None
        return mine.total.to(own.device)

    @contextmanager
    def attended_by(self, replica: int) -> Iterator[None]:
        """Be this replica in this thread, and then leave."""
        token = _seat.set(Seat(self, replica))
        try:
            yield
        finally:
            _seat.reset(token)
            self.leave()

    def leave(self) -> None:
        """One of them has nothing more to add."""
        with self._changed:
            self._num_present -= 1
            self._finish_if_all_have_come()

    def _finish_if_all_have_come(self) -> None:
        if self._waiting is None or len(self._waiting.parts) < self._num_present:
            return
        self._waiting.add_up()
        self._waiting = None
        self._changed.notify_all()


class _Round:
    """One sum."""

    def __init__(self, finish: Finish) -> None:
        self.parts: dict[int, torch.Tensor] = {}
        self.total: torch.Tensor | None = None
        self.error: BaseException | None = None
        self._finish = finish

    @property
    def is_over(self) -> bool:
        return self.total is not None or self.error is not None

    def add_up(self) -> None:
        try:
            first, *others = (self.parts[replica] for replica in sorted(self.parts))
            total = first.clone()
            for part in others:
                total += part.to(total.device)
            self.total = self._finish(total)
        except BaseException as error:  # each of them raises it
            self.error = error


class Seat(NamedTuple):
    """A replica's place in a meeting."""

    meeting: Meeting
    replica: int


_seat: ContextVar[Seat | None] = ContextVar("lockstep_seat", default=None)


def attending(tasks: Sequence[Callable[[], T]]) -> list[Callable[[], T]]:
    """Let ``tasks``, of which each is a replica's, meet."""
    meeting = Meeting(len(tasks))

    def attend(replica: int, task: Callable[[], T]) -> T:
        with meeting.attended_by(replica):
            return task()

    return [partial(attend, replica, task) for replica, task in enumerate(tasks)]


def this_seat() -> Seat | None:
    """The place that this thread has as a replica; None if it isn't one."""
    return _seat.get()


def sum_over_ranks(
    own: torch.Tensor, process_group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """The sum of ``own``, of one dimension, over the ranks, and then how many ranks count.

    Args:
        own: What this rank has to add; it may be written to.
        process_group: The ranks; by default all of ``lockstep.init()``.
    """
    group = process_group or init().process_group
    num_ranks = 1
    if group is not None and group.size() > 1:
        refresh_stale(group)
        sum_in_step(group, own)
        num_ranks = num_counted(group)
    return torch.cat([own, own.new_full((1,), num_ranks)])


# Asked before replicas in processes add up a mean: whether it is one of several that a batch of
# this thread consists of, of which those processes know nothing.
is_part_of_batch: list[Callable[[], bool]] = []


def mark_as_one(tensor: torch.Tensor) -> None:
    """Say that all replicas have the same scalar, which is to be gathered once.

    Its gradient is divided among them.
    """
    tensor._is_one_of_all_replicas = True  # type: ignore[attr-defined]


def is_one(tensor: torch.Tensor) -> bool:
    """Whether :meth:`mark_as_one` has said so."""
    return hasattr(tensor, "_is_one_of_all_replicas")
