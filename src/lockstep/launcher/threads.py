"""Ranks that are threads of the caller's process: for tests, notebooks and debuggers."""

from __future__ import annotations

import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Generic, TypeVar

import torch
import torch.distributed as dist

from lockstep.comm import RankThreads, a_rank_of, end_this_rank
from lockstep.errors import RankFailed
from lockstep.launcher.tracebacks import tell
from lockstep.launcher.verdict import Ending, Report, describe, first_failure
from lockstep.world import Placement, Starter, init
from lockstep.world.threads import in_place

Result = TypeVar("Result")

# How long the other ranks have to end after one has failed. Nothing can end a thread, but
# whatever waits for the failed rank is told at once.
_PATIENCE_SECONDS = 10.0


class _Run(Generic[Result]):
    """One launch: what its ranks have in common, and how each of them ended."""

    def __init__(
        self, fn: Callable[..., Result], args: Sequence[object], num_ranks: int, num_threads: int
    ) -> None:
        self._fn = fn
        self._args = tuple(args)
        self._num_ranks = num_ranks
        self._num_threads = num_threads
        self._store = dist.HashStore()
        self._crowd = RankThreads()
        self.results: dict[int, Result] = {}
        self.endings: queue.SimpleQueue[Ending] = queue.SimpleQueue()

    def be_rank(self, rank: int) -> None:
        """What the thread of a rank does."""
        size = self._num_ranks
        placement = Placement(Starter.THREADS, rank, size, rank, size)
        ending = Ending(rank, 0.0, exit_code=0)
        with a_rank_of(self._crowd), in_place(placement, self._store):
            try:
                torch.set_num_threads(self._num_threads)
                self.results[rank] = self._fn(init(), *self._args)
            except BaseException as error:  # whatever ends a rank has to be reported
                # Before anyone is told, so that what this one brings about comes later.
                ending = _ending(rank, error)
                self._crowd.fail(f"Rank {rank} of the launch has failed.")
                end_this_rank()
            finally:
                self.endings.put(ending)
                if dist.is_initialized():
                    dist.destroy_process_group()

    def interrupt(self) -> None:
        """Have the ranks' waits for each other end."""
        self._crowd.interrupt("The caller of launch() was interrupted.")


def run_threads(
    fn: Callable[..., Result], args: Sequence[object], num_ranks: int, num_threads: int
) -> list[Result]:
    """Call ``fn(world, *args)`` in ``num_ranks`` threads, each a rank; return what they return.

    Raises:
        RankFailed: If one didn't end well: the first that failed, with its traceback.
    """
    run = _Run(fn, args, num_ranks, num_threads)
    threads = [
        threading.Thread(target=run.be_rank, args=(rank,), name=f"rank {rank}", daemon=True)
        for rank in range(num_ranks)
    ]
    num_threads_before = torch.get_num_threads()
    try:
        for thread in threads:
            thread.start()
        endings = _endings(run.endings, num_ranks)
    except BaseException:
        run.interrupt()
        with suppress(KeyboardInterrupt):
            _join(threads)
        raise
    finally:
        # Set by a thread for itself, it is what threads that start later begin with.
        torch.set_num_threads(num_threads_before)
    culprit = first_failure(endings)
    _join(threads)
    if culprit is None:
        return [run.results[rank] for rank in range(num_ranks)]
    message = describe(culprit, endings, num_ranks)
    left = [thread.name for thread in threads if thread.is_alive()]
    if left:
        message += (
            f"\n\nStill running {_PATIENCE_SECONDS:g} s later: {', '.join(left)}. A thread can't "
            "be ended from outside; use ranks='processes' for a function that may hang."
        )
    raise RankFailed(
        message, rank=culprit.rank, exit_code=culprit.exit_code, traceback=culprit.traceback
    )


def _endings(arriving: queue.SimpleQueue[Ending], num_ranks: int) -> list[Ending]:
    """Wait for every rank to end, but once one has failed only for a while."""
    endings: list[Ending] = []
    deadline: float | None = None
    with suppress(queue.Empty):
        while len(endings) < num_ranks:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            endings.append(arriving.get(timeout=left))
            if deadline is None and endings[-1].failed:
                deadline = time.monotonic() + _PATIENCE_SECONDS
    return endings


def _join(threads: Sequence[threading.Thread]) -> None:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    for thread in threads:
        if thread.ident is not None:
            thread.join(max(0.0, deadline - time.monotonic()))


def _ending(rank: int, error: BaseException) -> Ending:
    now = time.monotonic()
    code = 1
    if isinstance(error, SystemExit):
        if error.code is not None and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
        # As of a process; and a function that exits hasn't returned.
        code = (error.code & 0xFF if isinstance(error.code, int) else 1) or 1
    elif isinstance(error, KeyboardInterrupt):
        code = 128 + signal.SIGINT
    told = tell(error, "; the error's attribute traceback has them")
    return Ending(rank, now, code, report=Report(now, code, told))
