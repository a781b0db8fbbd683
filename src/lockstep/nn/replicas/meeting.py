"""Where the replicas of one call add something up while they run, as ``lockstep.mean`` does.

They may be in several processes: what their caller knows, they have it asked.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from lockstep.comm import mean_divisor, sum_in_step
from lockstep.nn.backward import refresh_stale
from lockstep.world import group_or_all

T = TypeVar("T")

Finish = Callable[[torch.Tensor], torch.Tensor]
AskCaller = Callable[[Callable[..., Any], tuple[Any, ...]], Any]


class Meeting:
    """What the replicas of one call have in common.

    A replica that returns without coming, or fails, is waited for no more: it has nothing to add.

    Attributes:
        count: How many replicas there are.
        num_around: How many of what has them there are, as it may be a replica itself.
        spans_processes: Whether they, or what has them, are in different processes.

    Args:
        count: As above.
        in_processes: Whether these are.
    """

    def __init__(self, count: int, *, in_processes: bool = False) -> None:
        self.count = count
        self.num_around = num_replicas()
        self._around = _seat.get()
        self.spans_processes = in_processes or is_beside_processes()
        self._num_present = count
        self._changed = threading.Condition()
        self._waiting: Round | None = None
        self._error: BaseException | None = None

    def add_up(self, replica: int, own: torch.Tensor, finish: Finish | None = None) -> torch.Tensor:
        """Return ``finish`` of the sum of all replicas' tensors, in the order of the replicas.

        Args:
            replica: Which one this is.
            own: What it has to add, of the same shape and dtype on all, on any device.
            finish: What goes on with a sum that is not to be over these replicas alone: first it is
                one over those around them, too. Called once, in the process of the caller; it can
                be pickled.
        """
        try:
            mine = self.bring(replica, own, finish)
            with self._changed:
                self._changed.wait_for(lambda: mine.is_over or self._error is not None)
        except BaseException as interruption:
            self.fail(interruption)
            raise
        if mine.total is None:
            error = mine.error or self._error
            assert error is not None
            raise error
        return mine.total.to(own.device)

    def bring(
        self,
        replica: int,
        own: torch.Tensor,
        finish: Finish | None,
        tell: Callable[[Round], None] | None = None,
    ) -> Round:
        """The same for a replica that doesn't wait in this thread: ``tell`` it, once it is over."""
        with self._changed:
            if self._waiting is None:
                self._waiting = Round(finish and _beyond(self._around, finish))
            mine = self._waiting
            mine.parts[replica] = own
            if tell is not None:
                mine.tells.append(tell)
        self._finish_if_all_have_come()
        return mine

    def once(self, replica: int, device: torch.device, do: Callable[[], None]) -> None:
        """Let the first replica on each device ``do`` something, while all others wait."""
        kind = 1 + zlib.crc32(str(device).encode())
        kinds = torch.zeros(self.count, dtype=torch.long)
        kinds[replica] = kind
        on_this_device = self.add_up(replica, kinds).eq(kind)
        try:
            if int(on_this_device.int().argmax()) == replica:
                do()
        finally:
            self.add_up(replica, torch.zeros(0))

    @contextmanager
    def attended_by(self, replica: int) -> Iterator[None]:
        """Be this replica in this thread, and then leave."""
        token = _seat.set(Seat(self, replica))
        try:
            yield
        except Exception:
            self.leave()
            raise
        except BaseException as interruption:
            self.fail(interruption)
            raise
        else:
            self.leave()
        finally:
            _seat.reset(token)

    def leave(self) -> None:
        """One of them has nothing more to add."""
        with self._changed:
            self._num_present -= 1
        self._finish_if_all_have_come()

    def fail(self, error: BaseException) -> None:
        """Let whoever waits, or comes, raise ``error``: what all would add up to isn't known."""
        with self._changed:
            self._error = error
            self._changed.notify_all()
        self._finish_if_all_have_come()

    def _finish_if_all_have_come(self) -> None:
        with self._changed:
            over, error = self._waiting, self._error
            if over is None or (error is None and len(over.parts) < self._num_present):
                return
            self._waiting = None
        try:
            # Not while others can't wait, or be interrupted: it may take long.
            if error is None:
                over.add_up()
            else:
                over.error = error
        finally:
            with self._changed:
                self._changed.notify_all()
            for tell in over.tells:
                tell(over)


class Round:
    """One sum.

    Attributes:
        parts: What each replica has to add, by its number.
        total: Their sum, once it is made.
        error: What came in between.
        tells: Who else wants to know when it is over.

    Args:
        finish: Makes the total of the sum.
    """

    def __init__(self, finish: Finish | None) -> None:
        self.parts: dict[int, torch.Tensor] = {}
        self.total: torch.Tensor | None = None
        self.error: BaseException | None = None
        self.tells: list[Callable[[Round], None]] = []
        self._finish = finish

    @property
    def is_over(self) -> bool:
        """Whether it has come to an end."""
        return self.total is not None or self.error is not None

    def add_up(self) -> None:
        """Make the sum."""
        try:
            first, *others = (self.parts[replica] for replica in sorted(self.parts))
            total = first.clone()
            for part in others:
                total += part.to(total.device)
            self.total = total if self._finish is None else self._finish(total)
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


def num_replicas() -> int:
    """How many replicas there are of what runs in this thread, those of what is around it too."""
    seat = _seat.get()
    return 1 if seat is None else seat.meeting.count * seat.meeting.num_around


def _beyond(around: Seat | None, finish: Finish) -> Finish:
    """What finishes a sum that is one over the replicas around, too, if there are any."""
    if around is None:
        return finish
    return lambda total: around.meeting.add_up(around.replica, total, finish)


def sum_over_ranks(
    own: torch.Tensor, process_group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """The sum of ``own``, of one dimension, over the ranks, and then how many ranks count.

    Args:
        own: What this rank has to add; it may be written to.
        process_group: The ranks; by default all of ``lockstep.init()``.
    """
    group = group_or_all(process_group)
    num_ranks = 1
    if group is not None and group.size() > 1:
        refresh_stale(group)
        sum_in_step(group, own)
        num_ranks = mean_divisor(group)
    return torch.cat([own, own.new_full((1,), num_ranks)])


def in_caller(function: Callable[..., T], *arguments: object) -> T:
    """Return ``function(*arguments)``, run where replicas are called from.

    Args:
        function: What can be pickled.
        arguments: The same.
    """
    return function(*arguments) if _ask_caller is None else _ask_caller(function, arguments)


def caller_is_elsewhere(ask: AskCaller | None) -> None:
    """Say that this is a replica's process, and what has the caller's run a function."""
    global _ask_caller
    _ask_caller = ask


def is_replica_process() -> bool:
    """Whether :func:`caller_is_elsewhere` has been called here."""
    return _ask_caller is not None


def is_beside_processes() -> bool:
    """Whether this is a replica, or one of a replica's, of which others are in other processes."""
    seat = _seat.get()
    return is_replica_process() or (seat is not None and seat.meeting.spans_processes)


_ask_caller: AskCaller | None = None


def mark_as_one(tensor: torch.Tensor) -> None:
    """Say that all replicas have the same scalar, which is to be gathered once.

    Its gradient is divided among them.
    """
    tensor._is_one_of_all_replicas = True  # type: ignore[attr-defined]


def is_one(tensor: torch.Tensor) -> bool:
    """Whether :meth:`mark_as_one` has said so."""
    return hasattr(tensor, "_is_one_of_all_replicas")
