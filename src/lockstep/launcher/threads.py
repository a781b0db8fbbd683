"""Ranks that are threads of the caller's process: for tests, notebooks and debuggers."""

from __future__ import annotations

import math
import os
import queue
import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from lockstep.comm import RankThreads, TurnsOfRanks, a_rank_of, end_this_rank, this_thread
from lockstep.deadline import LOOK_SECONDS, Deadline
from lockstep.errors import BadLaunch
from lockstep.launcher.failures import Failure, JobOutcome, failure_by, failure_outcome
from lockstep.launcher.job import Job, Program
from lockstep.launcher.rank import MainOfRank, run_program
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
    results: dict[int, Result] = {}

    def call(rank: int) -> Failure | None:
        try:
            results[rank] = fn(init(), *args)
        except BaseException as error:  # all that ends a rank is reported
            # Before other ranks learn of it, so that failures that follow are later.
            return failure_by(error, rank, of_function=True)
        return None

    run_ranks(call, num_ranks, num_threads).check()
    return [results[rank] for rank in range(num_ranks)]


def run_ranks(
    call: Callable[[int], Failure | None],
    num_ranks: int,
    num_threads: int,
    turns: TurnsOfRanks | None = None,
    *,
    full_traceback: bool = False,
) -> JobOutcome:
    """Call ``call(rank)`` in ``num_ranks`` threads, each a rank, which returns how it has failed.

    With ``turns``, one of them runs at a time.
    """
    store, rank_threads = dist.HashStore(), RankThreads(turns)
    ended: queue.SimpleQueue[Failure | None] = queue.SimpleQueue()

    def run_rank(rank: int) -> None:
        placement = Placement(Starter.THREADS, rank, num_ranks, rank, num_ranks)
        failure = None
        with a_rank_of(rank_threads), as_rank(placement, store):
            try:
                if turns is not None:
                    turns.enter(rank)
                torch.set_num_threads(num_threads)
                if (failure := call(rank)) is not None:
                    rank_threads.fail(f"Rank {rank} of the launch has failed.")
                    end_this_rank()
            finally:
                if turns is not None:
                    turns.leave()
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
    outcome = JobOutcome(0)
    if failures:
        outcome = failure_outcome(failures, num_ranks, full_traceback=full_traceback)
        if left := [thread.name for thread in threads if thread.is_alive()]:
            running = (
                f"\n\nStill running {_TO_FOLLOW_SECONDS:g} s later: {', '.join(left)}. A thread "
                "can't be ended from outside; use ranks='processes' for a function that may hang."
            )
            outcome = replace(outcome, message=f"{outcome.message}{running}")
    return outcome


class _Generators:
    """The states of the global generators, of each rank its own, as processes have them."""

    def __init__(self) -> None:
        self._first, self._of_ranks = torch.get_rng_state(), dict[int, dict[str, Any]]()

    def swap(self, rank: int, before: int) -> None:
        """Keep the states of rank ``before``, and set those of ``rank``."""
        numpy: Any = getattr(sys.modules.get("numpy"), "random", None)
        if before >= 0:
            kept = {"torch": torch.get_rng_state(), "random": random.getstate()}
            if numpy is not None:
                kept["numpy"] = numpy.get_state()
            self._of_ranks[before] = kept
        state = self._of_ranks.get(rank, {})
        torch.set_rng_state(state.get("torch", self._first))
        if "random" in state:
            random.setstate(state["random"])
        else:
            random.seed()
        if "numpy" in state:
            numpy.set_state(state["numpy"])
        elif numpy is not None:
            numpy.seed()


def run_program_in_threads(job: Job) -> JobOutcome:
    """Run the program of ``job`` on ranks that are threads of this process, one at a time.

    Each has a ``__main__`` and global generators of its own. A rank runs until it waits for others:
    so its numbers are those of a process, and a debugger that stops it stops all.
    """
    program = job.program
    assert isinstance(program, Program)
    if not program.is_module and os.path.isdir(program.name):
        raise BadLaunch(
            f"{program.name!r} is a directory, which Python can't run in several threads. Give "
            "the file __main__.py in it."
        )

    def call(rank: int) -> Failure | None:
        return run_program(program, rank, True, nullcontext)[0]

    hook, main = sys.excepthook, sys.modules["__main__"]
    sys.modules["__main__"] = MainOfRank(main, this_thread)
    sys.excepthook = lambda kind, error, trace: None  # the first failure is told at the end
    try:
        turns = TurnsOfRanks(_Generators().swap)
        return run_ranks(
            call, job.num_ranks, job.num_threads, turns, full_traceback=job.full_traceback
        )
    finally:
        sys.excepthook, sys.modules["__main__"] = hook, main


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
