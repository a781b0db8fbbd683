"""Ranks that are threads of the caller's process: for tests, notebooks and debuggers."""

from __future__ import annotations

import math
import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from multiprocessing.process import BaseProcess
from typing import TypeVar

import torch
import torch.distributed as dist

from lockstep.comm import RankThreads, a_rank_of, end_this_rank
from lockstep.deadline import LOOK_SECONDS, Deadline
from lockstep.launcher.failures import Failure, failure_by, failure_outcome
from lockstep.world import Placement, Starter, as_rank, init

Result = TypeVar("Result")

# For the other ranks to end after one has failed. Nothing can end a thread, but a wait for the
# failed rank raises at once.
_TO_FOLLOW_SECONDS = 10.0


def run_threads(
    fn: Callable[..., Result], args: Sequence[object], num_ranks: int, num_threads: int
) -> list[Result]:
    """Call ``fn(world, *args)`` in ``num_ranks`` threads, each a rank; return their results.

    Raises:
        RankFailed: If one didn't end well: the first that failed, with its traceback.
    """
    store, rank_threads = dist.HashStore(), RankThreads()
    results: dict[int, Result] = {}
    ended: queue.SimpleQueue[Failure | None] = queue.SimpleQueue()

    def run_rank(rank: int) -> None:
        placement = Placement(Starter.THREADS, rank, num_ranks, rank, num_ranks)
        failure = None
        with a_rank_of(rank_threads), as_rank(placement, store):
            try:
                torch.set_num_threads(num_threads)
                results[rank] = fn(init(), *args)
            except BaseException as error:  # all that ends a rank is reported
                # Before other ranks learn of it, so that failures that follow are later.
                failure = failure_by(error, rank, of_function=True)
                rank_threads.fail(f"Rank {rank} of the launch has failed.")
                end_this_rank()
            finally:
                ended.put(failure)
                if dist.is_initialized():
                    dist.destroy_process_group()

    threads = [
        threading.Thread(target=run_rank, args=(rank,), name=f"rank {rank}", daemon=True)
        for rank in range(num_ranks)
    ]
    num_threads_before = torch.get_num_threads()
    try:
        with one_start_at_a_time():
            for thread in threads:
                thread.start()
            failures = _wait_for_endings(ended, num_ranks)
    except BaseException:
        rank_threads.interrupt("The caller of launch() was interrupted.")
        with suppress(KeyboardInterrupt):
            _join(threads)
        raise
    finally:
        # A rank's own number is also the one that threads which start later begin with.
        torch.set_num_threads(num_threads_before)
    _join(threads)
    if failures:
        outcome = failure_outcome(failures, num_ranks)
        if left := [thread.name for thread in threads if thread.is_alive()]:
            running = (
                f"\n\nStill running {_TO_FOLLOW_SECONDS:g} s later: {', '.join(left)}. A thread "
                "can't be ended from outside; use ranks='processes' for a function that may hang."
            )
            outcome = replace(outcome, message=f"{outcome.message}{running}")
        outcome.check()
    return [results[rank] for rank in range(num_ranks)]


@contextmanager
def one_start_at_a_time() -> Iterator[None]:
    """Let one rank at a time start a process, such as a worker of a DataLoader.

    What libraries do around a fork may refuse another fork meanwhile: filelock on Python 3.12.
    """
    start, lock, pid = BaseProcess.start, threading.Lock(), os.getpid()

    def start_alone(self: BaseProcess) -> None:
        with lock if os.getpid() == pid else nullcontext():  # in a child it stays locked
            start(self)

    BaseProcess.start = start_alone  # type: ignore[method-assign]
    try:
        yield
    finally:
        BaseProcess.start = start  # type: ignore[method-assign]


def _wait_for_endings(ended: queue.SimpleQueue[Failure | None], num_ranks: int) -> list[Failure]:
    """Wait until every rank has ended or, once one has failed, for a while."""
    failures: list[Failure] = []
    num_running, deadline = num_ranks, Deadline(math.inf)
    while num_running and (left := deadline.left()):
        with suppress(queue.Empty):
            # In parts, as a signal just before a wait, or to another thread, doesn't end it.
            failure = ended.get(timeout=min(left, LOOK_SECONDS))
            num_running -= 1
            if failure is not None:
                failures.append(failure)
                deadline = deadline if failures[1:] else Deadline(_TO_FOLLOW_SECONDS)
    return failures


def _join(threads: Sequence[threading.Thread]) -> None:
    deadline = Deadline(_TO_FOLLOW_SECONDS)
    for thread in threads:
        if thread.ident is not None:
            thread.join(deadline.left())
