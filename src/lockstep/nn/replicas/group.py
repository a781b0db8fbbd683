"""The group that the replicas of one call form: their sums, their caller, and its backward."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch

T = TypeVar("T")

Finish = Callable[[torch.Tensor], torch.Tensor]
AskCaller = Callable[[Callable[..., object], tuple[object, ...]], object]


@dataclass(frozen=True)
class Replica:
    """The replica that runs in a thread.

    Attributes:
        index: Its number among the replicas of its call.
        count: The number of these.
        num_around: The number of replicas of the caller, which may run in one itself.
        spans_processes: Whether some of all these replicas are in other processes.
        sums: Their sums; None if these are the caller's, which is another process.
    """

    index: int
    count: int
    num_around: int
    spans_processes: bool
    sums: ReplicaSums | None

    def add_up(self, own: torch.Tensor, finish: Finish | None = None) -> torch.Tensor:
        """Return ``finish`` of the sum of all replicas' tensors, in the order of the replicas.

        Args:
            own: This replica's part, of the same shape and dtype on all, on any device.
            finish: Continues a sum that is not over these replicas alone: first it is added up
                over the replicas around them, too. Called once, in the process of the caller; it
                can be pickled.
        """
        if self.sums is None:
            total = in_caller(_add_up_here, own, finish)
        else:
            total = self.sums.add_up(self.index, own, finish)
        return total.to(own.device)


@dataclass
class _PendingSum:
    """A sum whose parts, by the number of the replica, have not all come."""

    finish: Finish | None
    parts: dict[int, torch.Tensor] = field(default_factory=dict)
    total: Future[torch.Tensor] = field(default_factory=Future)

    def compute(self) -> torch.Tensor:
        first, *others = (self.parts[index] for index in sorted(self.parts))
        total = first.clone()
        for part in others:
            total += part.to(total.device)
        return total if self.finish is None else self.finish(total)


class ReplicaSums:
    """The sums that replicas of one call make while they run, as ``lockstep.mean`` does.

    A replica that has returned or failed takes part with zeros: nobody waits for it.
    """

    def __init__(self, count: int) -> None:
        self._around = _replica.get()
        self._num_present = count
        self._lock = threading.Lock()
        self._pending: _PendingSum | None = None
        self._error: BaseException | None = None

    def add_up(self, index: int, own: torch.Tensor, finish: Finish | None) -> torch.Tensor:
        """The sum of all replicas' tensors: see :meth:`Replica.add_up`."""
        around = self._around
        if finish is not None and around is not None:
            finish = partial(around.add_up, finish=finish)
        try:
            with self._lock:
                if self._pending is None:
                    self._pending = _PendingSum(finish)
                mine = self._pending
                mine.parts[index] = own
            self._finish_if_complete()
            return mine.total.result()
        except BaseException as error:
            if not isinstance(error, Exception):  # this thread is interrupted
                self.fail(error)
            raise

    def leave(self) -> None:
        """Wait no longer for one of the replicas."""
        with self._lock:
            self._num_present -= 1
        self._finish_if_complete()

    def fail(self, error: BaseException) -> None:
        """Make all current and later callers raise ``error``: the sum of all isn't known."""
        with self._lock:
            self._error = error
        self._finish_if_complete()

    def _finish_if_complete(self) -> None:
        with self._lock:
            pending, error = self._pending, self._error
            if pending is None or (error is None and len(pending.parts) < self._num_present):
                return
            self._pending = None
        # Without the lock: a sum over ranks waits for them.
        try:
            if error is not None:
                raise error
            total = pending.compute()
        except BaseException as failure:  # every replica raises it
            pending.total.set_exception(failure)
        else:
            pending.total.set_result(total)


def as_replicas(
    tasks: Sequence[Callable[[], T]], *, in_processes: bool = False
) -> list[Callable[[], T]]:
    """Let each of ``tasks`` be that of one replica, in whichever thread it runs."""
    sums, count = ReplicaSums(len(tasks)), len(tasks)
    spans_processes = in_processes or is_beside_processes()

    def run(replica: Replica, task: Callable[[], T]) -> T:
        try:
            with as_replica(replica):
                result = task()
        except BaseException as error:
            if not isinstance(error, Exception):
                sums.fail(error)
            raise
        finally:
            sums.leave()
        return result

    return [
        partial(run, Replica(index, count, num_replicas(), spans_processes, sums), task)
        for index, task in enumerate(tasks)
    ]


_replica: ContextVar[Replica | None] = ContextVar("lockstep_replica", default=None)


@contextmanager
def as_replica(replica: Replica) -> Iterator[None]:
    """Be this replica in this thread."""
    token = _replica.set(replica)
    try:
        yield
    finally:
        _replica.reset(token)


def this_replica() -> Replica | None:
    """The replica that this thread runs, if any."""
    return _replica.get()


def num_replicas() -> int:
    """The number of replicas of the code that this thread runs, those around it included."""
    replica = _replica.get()
    return 1 if replica is None else replica.count * replica.num_around


def _add_up_here(own: torch.Tensor, finish: Finish | None) -> torch.Tensor:
    """The same in the caller's process, in the thread that stands for the replica."""
    replica = _replica.get()
    assert replica is not None
    return replica.add_up(own, finish)


# Replicas in processes of their own ask the caller's process

_ask_caller: AskCaller | None = None


def in_caller(function: Callable[..., T], *arguments: object) -> T:
    """Return ``function(*arguments)``, run where replicas are called from; both can be pickled."""
    if _ask_caller is None:
        return function(*arguments)
    return _ask_caller(function, arguments)  # type: ignore[return-value]


def set_caller(ask: AskCaller | None) -> None:
    """Declare this process to be a replica's, with a way to run a function in the caller's."""
    global _ask_caller
    _ask_caller = ask


def is_replica_process() -> bool:
    """Whether :func:`set_caller` has been called here."""
    return _ask_caller is not None


def is_beside_processes() -> bool:
    """Whether this is a replica, or inside of one, of which others are in other processes."""
    replica = _replica.get()
    return is_replica_process() or (replica is not None and replica.spans_processes)


# Scalars that all replicas have


def mark_as_one(tensor: torch.Tensor) -> None:
    """Mark a scalar that all replicas have: it is gathered once, and its gradient is divided."""
    tensor._is_one_of_all_replicas = True  # type: ignore[attr-defined]


def is_one(tensor: torch.Tensor) -> bool:
    """Whether :func:`mark_as_one` has marked it."""
    return hasattr(tensor, "_is_one_of_all_replicas")
