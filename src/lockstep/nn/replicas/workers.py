"""Threads that wait for work, and what comes of it."""

from __future__ import annotations

import itertools
import os
import queue
import threading
import traceback
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import torch

from lockstep.nn.replicas.modes import as_this_thread
from lockstep.nn.replicas.openmp import alone

T = TypeVar("T")


@dataclass
class Outcome(Generic[T]):
    """What came of one task.

    Attributes:
        value: What it returned, if it did.
        error: What it raised, if it did.
    """

    value: T | None = None
    error: BaseException | None = None


def nothing() -> None:
    """Do nothing."""


class WorkerThreads:
    """So many threads, of which the caller's is one, that share its intra-op threads.

    The others start with the first task, and end when this object is closed or nobody has it any
    more.

    Args:
        count: How many.
        num_sharing: Among how many the intra-op threads are shared, if not among these.
        name: What the others are called, and a number.
    """

    def __init__(
        self, count: int, num_sharing: int | None = None, name: str = "lockstep-replica"
    ) -> None:
        self._name = name
        self._num_sharing = count if num_sharing is None else num_sharing
        self._queues = [queue.SimpleQueue[Callable[[], None] | None]() for _ in range(count - 1)]
        self._num_threads = 0
        self._pid = -1  # of the process in which they were started
        self.close = weakref.finalize(self, _end, self._queues)

    def run(
        self,
        tasks: Sequence[Callable[[], T]],
        meanwhile: Callable[[], None] = nothing,
        interrupted: Callable[[], None] | None = None,
    ) -> list[Outcome[T]]:
        """Run each task in a thread of its own, as the caller would, and wait for all of them.

        Args:
            tasks: What to run. The caller runs the first one.
            meanwhile: What it does then.
            interrupted: What it does if the program is to be interrupted, instead of waiting for
                the others: no thread may be needed any more then.

        Raises:
            BaseException: What interrupts the caller while it waits, as Ctrl-C does.
        """
        if self._pid != os.getpid():  # also in a process that was forked, which has none of them
            self._num_threads = 0
            self._queues[:] = [queue.SimpleQueue() for _ in self._queues]
            for number, tasks_of_one in enumerate(self._queues, start=1):
                name = f"{self._name}-{number}"
                threading.Thread(target=_work, args=(tasks_of_one,), name=name, daemon=True).start()
            self._pid = os.getpid()
        mine = torch.get_num_threads()
        each = max(1, mine // self._num_sharing)
        if each != self._num_threads:
            self._num_threads = each
            others: list[Callable[[], None]] = [partial(_set_num_threads, each)]
            self._run([lambda: None, *others * len(self._queues)])
        with alone(each):
            return self._run(tasks, meanwhile, interrupted)

    def _run(
        self,
        tasks: Sequence[Callable[[], T]],
        meanwhile: Callable[[], None] = nothing,
        interrupted: Callable[[], None] | None = None,
    ) -> list[Outcome[T]]:
        outcomes: list[Outcome[T]] = [Outcome() for _ in tasks]
        done = queue.SimpleQueue[None]()

        def fill(outcome: Outcome[T], task: Callable[[], T]) -> None:
            try:
                outcome.value = task()
            except BaseException as error:  # it is raised in the caller
                outcome.error = error
            finally:
                done.put(None)

        own = [as_this_thread(task) for task in tasks[1:]]
        mine, *others = map(partial, itertools.repeat(fill), outcomes, [*tasks[:1], *own])
        for tasks_of_one, task in zip(self._queues, others, strict=False):
            tasks_of_one.put(task)
        count = len(tasks)
        try:
            mine()
            meanwhile()
            if interrupted is not None and is_interruption(outcomes[0].error):
                count = 0
                interrupted()
        finally:
            _get_all(done, count, interrupted)
        return outcomes


def _get_all(
    done: queue.SimpleQueue[None], count: int, interrupted: Callable[[], None] | None
) -> None:
    """Wait until all are done, also if the program is to be interrupted, unless there is a way out.

    Who goes on before would meet threads that still write to what the next call uses.
    """
    interruption: BaseException | None = None
    while count:
        try:
            done.get()
            count -= 1
        except BaseException as error:
            if interrupted is not None:
                interrupted()
                raise
            if not isinstance(error, KeyboardInterrupt):
                raise
            interruption = error
    if interruption is not None:
        raise interruption


def _set_num_threads(count: int) -> None:
    # A thread that has not been asked takes up the caller's number with its first operation.
    torch.get_num_threads()
    torch.set_num_threads(count)


def _work(tasks: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (task := tasks.get()) is not None:
        task()
        del task  # and with it what it refers to, while this thread waits


def _end(queues: Sequence[queue.SimpleQueue[Callable[[], None] | None]]) -> None:
    for tasks in queues:
        tasks.put(None)


def is_interruption(error: BaseException | None) -> bool:
    """Whether the program is to end, as by Ctrl-C or ``sys.exit()``, and not just one call."""
    return error is not None and not isinstance(error, Exception)


def values_of(outcomes: Sequence[Outcome[T]], devices: Sequence[object]) -> list[T]:
    """What the replicas returned.

    Raises:
        BaseException: What the first replica that failed has raised, with a note that says which
            it was, and one for each other that failed.
    """
    failed = [(i, one.error) for i, one in enumerate(outcomes) if one.error is not None]
    if failed:
        first, error = failed[0]
        error.add_note(f"(raised in replica {first} on {devices[first]})")
        for index, other in failed[1:]:
            trace = "".join(traceback.format_exception(other)).rstrip()
            error.add_note(f"Replica {index} on {devices[index]} failed as well:\n{trace}")
        raise error
    return [outcome.value for outcome in outcomes]  # type: ignore[misc]
