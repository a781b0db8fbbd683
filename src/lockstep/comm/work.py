"""Calls that have been made and are yet to be carried out, in order.

Note [Who carries out a call]: a collective on memory takes the processor, not the network, so
there is nothing to gain from another thread while this one computes, and a switch between
threads costs more than most collectives. So a call is carried out

- at once by who makes it, if it isn't asynchronous;
- else by who waits for it, in ``wait()``, together with the calls before it;
- else by the group's own thread, when somebody asks for its future or whether it is completed,
  or when a moment has passed: no rank may be kept waiting because another waits for something
  else first.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from lockstep.comm.arguments import overlap
from lockstep.comm.futures import Outcome
from lockstep.comm.rank_threads import of_this_rank
from lockstep.comm.uncompiled import uncompiled
from lockstep.errors import CollectiveFailed
from lockstep.torch_private import _InferenceMode

# How often the group's own thread looks whether a call lies there that it found there last time.
# It isn't woken for each: that takes 50 us, and most calls are waited for sooner than this.
_GRACE_SECONDS = 0.02
# How often it looks in vain before it ends: 5 seconds.
_LOOKS_IN_VAIN = 250

# How long a thread waits for another one that is carrying out calls, before it looks whether its
# own has been.
_PATIENCE_SECONDS = 0.002

# How many works are kept that only torch's C++ may have, and with results of how many bytes at
# most. See GroupWork.__del__.
_MAX_DROPPED = 16
_MAX_DROPPED_BYTES = 4096

# Carries out a call, waiting for other ranks at most the given number of seconds each time.
Run = Callable[[float], None]


@uncompiled
class GroupWork(dist.Work):
    """A call, as the Work that torch.distributed gives to who made it."""

    def __init__(
        self,
        queue: WorkQueue,
        run: Run,
        results: Sequence[torch.Tensor],
        timeout: timedelta,
    ) -> None:
        super().__init__()
        self._timeout = timeout
        self._queue = queue
        self._run = run
        self._results = list(results)
        self._error: Exception | None = None
        self._is_done = False
        self._is_taken = False
        self._outcome: Outcome | None = None
        self._future_lock = threading.Lock()

    def __del__(self) -> None:
        # Torch's C++ may have this work still, as DDP's reducer has in torch's join(): without the
        # Python object its wait() never returns, and it has no future. When C++ lets go of it
        # can't be seen, so the last ones stay that Python has taken no result of.
        # Shown by test_a_work_that_only_cpp_has_can_be_waited_for.
        if not self._is_taken:
            if (
                sum(each.numel() * each.element_size() for each in self._results)
                > _MAX_DROPPED_BYTES
            ):
                self._results = []
            self._queue.dropped.append(self)

    @classmethod
    def done(cls, results: Sequence[torch.Tensor]) -> GroupWork:
        """A work that needs no waiting for."""
        work = cls(WorkQueue(timedelta(0)), lambda timeout: None, results, timedelta(0))
        work._is_done = work._is_taken = True
        return work

    @property
    def timeout(self) -> timedelta:
        """How long it may wait for other ranks."""
        return self._timeout

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when the result is there; it is an error if that takes longer than ``timeout``.

        Raises:
            CollectiveFailed: If the ranks could not carry it out.
        """
        if timeout is None:  # C++ always gives one
            self._is_taken = True
        if not self._is_done:
            self._queue.carry_out_until(self, timeout)
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        """As :meth:`wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether it was carried out, or failed."""
        if not self._is_done:
            self._queue.hurry()
        return self._is_done

    def is_success(self) -> bool:
        """Whether it was carried out."""
        return self.is_completed() and self._error is None

    def exception(self) -> Exception | None:
        """What made it fail, if it failed."""
        return self._error

    def result(self) -> list[torch.Tensor]:
        """The tensors that hold the result."""
        self.wait()
        return self._results

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A future of the tensors that hold the result."""
        self._is_taken = True
        with self._future_lock:
            if self._outcome is None:
                self._outcome = Outcome()
                if self._is_done:
                    self._outcome.tell(self._results, self._error)
                else:
                    self._queue.hurry()
            return self._outcome.future

    def carry_out(self, timeout: float) -> None:
        """Do what was called for, with the queue's lock held; :meth:`tell` is to follow."""
        try:
            # Results are written, and memory of others is read, whatever the thread's own mode.
            with _InferenceMode(True):
                self._run(timeout)
        except CollectiveFailed as error:
            self._error = error
        except Exception as error:  # such as no memory left, in the middle of it
            self._error = error
            self._queue.give_up(error)
        except BaseException as error:  # such as Ctrl-C
            self._error = RuntimeError(f"This call was interrupted: {error!r}")
            self._queue.give_up(error)
            raise
        finally:
            del self._run
            with self._future_lock:
                self._is_done = True

    def tell(self) -> None:
        """Tell the future, if there is one. Its callbacks are run here, and may make calls."""
        if self._outcome is not None and not self._outcome.is_told:
            self._queue.step_aside()
            self._outcome.tell(self._results, self._error)


class WorkQueue:
    """The calls of one rank on one group, carried out in the order in which they were made.

    Any thread may submit and wait. See Note [Who carries out a call].

    Attributes:
        num_submitted: How many calls there were.

    Args:
        timeout: How long a call may wait for other ranks, unless it says otherwise.
        give_up: What to do when a call ends halfway because of something that concerns this rank
            alone: the other ranks are at another point then, and must not take the next call for
            this one. Shown by test_a_rank_that_fails_halfway_spoils_no_later_sum.
    """

    def __init__(
        self, timeout: timedelta, give_up: Callable[[BaseException], None] = lambda error: None
    ) -> None:
        self.timeout = timeout
        self.give_up = give_up
        self.num_submitted = 0
        self._numbers = itertools.count(1)
        # Held while a call is carried out. Reentrant for a signal handler's calls.
        self._carrying_out = threading.RLock()
        # The thread that is in the middle of a call, if one is.
        self._runner: int | None = None
        self._calls: deque[GroupWork] = deque()
        self._thread: threading.Thread | None = None
        self._thread_lock = threading.Lock()
        self._is_watched = False
        self._is_urgent = threading.Event()
        self._is_closed = False
        self.dropped: deque[GroupWork] = deque(maxlen=_MAX_DROPPED)

    def submit(
        self,
        run: Run,
        results: Sequence[torch.Tensor],
        *,
        is_async: bool,
        timeout: timedelta | None = None,
    ) -> GroupWork:
        """Take a call; unless it ``is_async``, carry it out before returning."""
        if timeout is None or timeout < timedelta(0):  # not set
            timeout = self.timeout
        if not is_async:
            self._check_thread()
        self.num_submitted = next(self._numbers)
        work = GroupWork(self, run, results, timeout)
        self._calls.append(work)
        if not is_async:
            self.carry_out_until(work)
        elif self._is_closed:
            self.carry_out_all()
        elif not self._is_watched:
            self._watch()
        return work

    def carry_out_until(self, work: GroupWork, timeout: timedelta | None = None) -> None:
        """Carry out what was called, up to and including ``work``."""
        self._check_thread()
        while not work._is_done:
            # Another thread may be on a later call by then, which this one must not wait for:
            # what the other ranks need to come to that may be what this thread does next.
            # Shown by test_a_call_that_nobody_waits_for_keeps_no_rank_waiting.
            if self._carrying_out.acquire(timeout=_PATIENCE_SECONDS):
                self._carry_out_next(timeout, until=work)

    def _check_thread(self) -> None:
        """Raise RuntimeError if this thread is in the middle of a call: a signal's handler is."""
        if self._runner == threading.get_ident():
            raise RuntimeError(
                "A collective was called while this thread is in the middle of another one of the "
                "same group, by the handler of a signal. Have the handler set a flag, and look at "
                "that between steps; or call it with async_op=True, and wait later."
            )

    def _carry_out_next(
        self, timeout: timedelta | None = None, until: GroupWork | None = None
    ) -> None:
        """Carry out a call, unless ``until`` is done, with the lock held, which this lets go of."""
        call: GroupWork | None = None
        try:
            if self._calls and not (until is not None and until._is_done):
                call = self._calls.popleft()
                limit = call.timeout
                if timeout is not None and timedelta(0) < timeout < limit:
                    limit = timeout
                self._runner = threading.get_ident()
                call.carry_out(limit.total_seconds())
        finally:
            self._runner = None
            self._carrying_out.release()
            # Not before: callbacks may wait for other calls, which then another thread has to
            # carry out. Shown by test_a_callback_may_wait_for_another_calls_future.
            if call is not None:
                call.tell()

    def hurry(self) -> None:
        """Somebody looks for a result without waiting: have the thread carry out what is there."""
        self._watch()
        self._is_urgent.set()

    def _watch(self) -> None:
        """Have a thread that looks after calls that nobody waits for."""
        with self._thread_lock:
            if not self._is_watched and not self._is_closed:
                self._is_watched = True
                self._thread = threading.Thread(
                    target=of_this_rank(self._carry_out_leftovers),
                    name="lockstep-collectives",
                    daemon=True,
                )
                self._thread.start()

    def step_aside(self) -> None:
        """If this is the queue's own thread, let another one take its place meanwhile."""
        with self._thread_lock:
            if self._thread is threading.current_thread():
                self._is_watched = False

    def _step_back(self) -> bool:
        """Whether this is the queue's own thread still."""
        with self._thread_lock:
            if self._thread is not threading.current_thread():
                return False
            self._is_watched = True
            return True

    def _carry_out_leftovers(self) -> None:
        looks_in_vain = 0
        found: GroupWork | None = None
        while not self._is_closed and looks_in_vain < _LOOKS_IN_VAIN:
            is_urgent = self._is_urgent.wait(_GRACE_SECONDS)
            self._is_urgent.clear()
            looks_in_vain += 1
            if is_urgent or (found is not None and not found._is_done):
                looks_in_vain = 0
                self.carry_out_all()
                if not self._step_back():
                    return
            try:
                newest = self._calls[-1]
            except IndexError:
                found = None
                continue
            if newest is not found:
                looks_in_vain = 0
            found = newest
        self._is_watched = False
        # One that came since the last look relied on this thread.
        if self._calls:
            self._watch()

    def carry_out_all(self) -> None:
        """Carry out what was called. Of a group that was closed it fails at once."""
        while self._calls:
            self._carrying_out.acquire()
            self._carry_out_next()

    def let_go(self) -> None:
        """Have the thread end soon. It takes no lock: a garbage collection may call it."""
        self._is_closed = True
        self.dropped.clear()

    def close(self) -> None:
        """Have the thread end, and wait until it is through."""
        with self._thread_lock:
            self._is_closed = True
            thread = self._thread
        self._is_urgent.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join()


def in_turn(runs: Sequence[Run]) -> Run:
    """One run of them all."""
    if len(runs) == 1:
        return runs[0]

    def run(timeout: float) -> None:
        for each in runs:
            each(timeout)

    return run


def reading_first(
    tensors: Sequence[torch.Tensor], prepare: Callable[[Sequence[torch.Tensor]], Run]
) -> Run:
    """What ``prepare`` makes of ``tensors``; each is read before any that overlaps is written."""
    direct = prepare(tensors)
    if len(tensors) == 1 or not overlap(tensors):
        return direct

    def run(timeout: float) -> None:
        copies = [tensor.clone() for tensor in tensors]
        prepare(copies)(timeout)
        for tensor, copy in zip(tensors, copies, strict=True):
            tensor.data.copy_(copy)

    return run
