"""Calls that have been submitted and not yet carried out, in order.

Note [Who carries out a call]: a collective on memory takes the processor, not the network, so
another thread can't overlap it with this one's computation, and a switch between threads costs
more than most collectives. So a call is carried out

- at once by the thread that makes it, if it isn't asynchronous;
- else by the thread that waits for it in ``wait()``, together with the calls before it;
- else by the queue's own thread, when somebody asks for its future or whether it is completed,
  or after a moment: another rank may wait for this call while this rank waits for another one.

Note [Mismatches]: ranks that made different calls all raise CollectiveMismatch in the same
exchange, and go on together from there. What they have in flight must meet no later call: until a
caller on this rank is told of the error, calls that were submitted meanwhile fail as well, without
an exchange. They are one generation, and the next call is the first of a new one. The caller isn't
told for certain by a future, which C++ may wait for: then the group is broken. And so it is when a
caller that was told of one call takes the error of another one, which was not carried out: if ranks
go on call by call, the other ranks may have carried it out with a later call of this rank.
"""

from __future__ import annotations

import itertools
import math
import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm.dynamo import uncompiled
from lockstep.comm.failures import without_traceback
from lockstep.comm.threads.ranks import of_this_rank, passed_on
from lockstep.deadline import Deadline
from lockstep.errors import CollectiveMismatch, CollectiveTimeout
from lockstep.torch_private import _InferenceMode

# The interval at which the queue's own thread looks for calls that it has seen before. Calls don't
# wake it: that takes 50 us, and most calls are waited for within the interval.
_GRACE_SECONDS = 0.02
# The number of looks without a call after which the thread ends: 5 seconds.
_MAX_IDLE_LOOKS = 250
# The interval at which a thread that waits for its call tries to carry it out itself.
_TURN_SECONDS = 0.002
# How long after its deadline a wait goes on for another thread, which looks at it if it can: not if
# it waits for Gloo.
DEAF_SECONDS = 2.0
# The number of works, and the size of their results, that are kept for torch's C++ after Python has
# dropped them. See GroupWork.__del__.
_MAX_DROPPED = 16
_MAX_DROPPED_BYTES = 4096

# The end of a wait without a limit of its own.
NEVER = Deadline(math.inf)

# Carries out a call, or a part. The deadline is that of each of its waits for other ranks.
Run = Callable[[Deadline], None]


def unheard(end: Deadline) -> CollectiveTimeout:
    """Return the error of a wait that ends although another thread goes on with the call."""
    return CollectiveTimeout(
        f"A call was not carried out within {end.seconds:g} s: another thread of this rank still "
        "waits in it for other ranks. See what they do.",
        (),
        "wait",
    )


def start_thread(target: Callable[[], None], name: str) -> threading.Thread:
    """Start a thread that works for this one, as the same rank."""
    thread = threading.Thread(target=of_this_rank(target), name=name, daemon=True)
    thread.start()
    return thread


@uncompiled
class BaseWork(dist.Work):
    """An operation that was started, as a Work that torch.distributed returns to the caller."""

    _error: Exception | None = None
    _is_done = False
    _is_taken = False
    # torch's reducer reads the future in C++, to which an error of ``set_exception`` looks like a
    # result. So a first future says that the outcome is there, and its ``then`` returns or raises
    # that, which C++ sees too. Shown by test_torchs_ddp_is_told_of_a_lost_rank.
    _is_there: torch.futures.Future[None] | None = None
    _is_told = False
    _deadline = Deadline(0)  # until it is carried out

    def __init__(self, results: Sequence[Tensor], timeout: timedelta) -> None:
        super().__init__()
        self._results, self._seconds = list(results), timeout.total_seconds()
        self._lock = threading.Lock()

    @abstractmethod
    def _complete(self, end: Deadline) -> None:
        """Wait until the operation is done, which is an error after ``end``; errors are stored."""

    @abstractmethod
    def _hurry(self) -> None:
        """Have another thread complete the operation, and the future with :meth:`_tell`."""

    @abstractmethod
    def _carry_out(self, deadline: Deadline) -> None:
        """Do the operation, in which the deadline starts again with each wait."""

    def _failed(self, error: BaseException) -> None:
        """Handle an error of the operation, which is stored already."""

    def bring_forward(self, end: Deadline) -> None:
        """End its waits for other ranks at ``end``, if that is sooner."""
        self._deadline.bring_forward(end)

    def carry_out(self, end: Deadline) -> None:
        """Do the work; :meth:`_tell` is to follow, without the locks of the caller."""
        self._deadline = Deadline(min(self._seconds, end.seconds))
        try:
            # Results are written, and memory of others is read, whatever the thread's own mode.
            with _InferenceMode(True):
                self._carry_out(self._deadline)
        except Exception as error:
            self._error = error
            self._failed(error)
        except BaseException as error:  # such as Ctrl-C
            self._error = RuntimeError(f"This call was interrupted: {error!r}")
            self._failed(error)
            raise
        finally:
            self._is_done = True

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when the result is there; it is an error if that takes longer than ``timeout``.

        Raises:
            CollectiveFailed: If the ranks could not carry it out.
        """
        if timeout is None:  # C++ always gives one
            self._is_taken = True
        if not self._is_done:
            seconds = 0.0 if timeout is None else timeout.total_seconds()
            self._complete(Deadline(seconds) if seconds > 0 else NEVER)
        if self._error is not None:
            raise self.exception() or self._error
        return True

    def synchronize(self) -> None:
        """As :meth:`wait`."""
        self.wait()

    def is_success(self) -> bool:
        """Whether it was carried out."""
        return self.is_completed() and self._error is None

    def exception(self) -> Exception | None:
        """The error, if it failed."""
        return self._error

    def result(self) -> list[Tensor]:
        """The tensors that hold the result."""
        self.wait()
        return self._results

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """A future of the tensors; it fails with a RuntimeError of the error's name and text."""
        self._is_taken = True
        with self._lock:
            if is_first := self._is_there is None:
                self._is_there = torch.futures.Future()
                self._future = self._is_there.then(self._outcome)
        if is_first and self._is_done:
            self._tell()
        elif is_first:
            self._hurry()
        return self._future

    def _tell(self) -> None:
        """Complete the future, if there is one; only the first call counts."""
        with self._lock:
            if self._is_there is None or self._is_told:
                return
            self._is_told = True
        self._is_there.set_result(None)

    def _outcome(self, _: object) -> list[Tensor]:
        if self._error is not None:
            raise RuntimeError(f"{type(self._error).__name__}: {self._error}")
        return self._results


class Generation:
    """The calls that fail together if one meets other calls of other ranks: with this error."""

    error: CollectiveMismatch | None = None


@uncompiled
class GroupWork(BaseWork):
    """A submitted call."""

    def __init__(
        self, queue: WorkQueue, runs: Sequence[Run], results: Sequence[Tensor], timeout: timedelta
    ) -> None:
        super().__init__(results, timeout)
        self._queue, self._runs = queue, runs
        self._generation, self._was_skipped = queue.generation, False

    def __del__(self) -> None:
        # Torch's C++ may still hold this work, as DDP's reducer does in torch's join(): without the
        # Python object its wait() never returns, and it has no future. When C++ drops it can't be
        # seen, so the last works whose result Python hasn't taken are kept.
        # Shown by test_a_work_that_only_cpp_has_can_be_waited_for.
        if not self._is_taken:
            if sum(each.numel() * each.itemsize for each in self._results) > _MAX_DROPPED_BYTES:
                self._results = []
            self._queue.dropped.append(self)

    def _complete(self, end: Deadline) -> None:
        self._queue.check_thread()
        self._queue.carry_out_until(self, end)

    def is_completed(self) -> bool:
        """Whether it was carried out, or failed."""
        if not self._is_done:
            self._hurry()
        return self._is_done

    def _hurry(self) -> None:
        self._queue.hurry()

    def _carry_out(self, deadline: Deadline) -> None:
        runs, self._runs = self._runs, ()
        if (earlier := self._generation.error) is not None:
            self._was_skipped = True
            raise without_traceback(earlier)
        for run in runs:
            run(deadline)

    def _failed(self, error: BaseException) -> None:
        if isinstance(error, CollectiveMismatch):
            self._generation.error = without_traceback(error)
        self._queue.call_failed(error)

    def exception(self) -> Exception | None:
        """The error, if it failed."""
        if self._error is not None:
            if self._was_skipped and self._queue.generation is not self._generation:
                self._queue.fail(self._error)
            self._queue.end_generation(self._generation)
        return self._error

    def _outcome(self, _: object) -> list[Tensor]:
        if isinstance(self._error, CollectiveMismatch):
            self._queue.fail(self._error)
        return super()._outcome(_)

    def tell(self) -> None:
        """Complete the future, if there is one. Its callbacks may make calls, and wait for them."""
        if self._is_there is None or self._is_told:
            return
        if self._queue.is_this_thread():
            with suppress(RuntimeError):  # there may be as many threads as are allowed
                start_thread(self._tell, "lockstep-callback")
                return
        self._tell()


class WorkQueue:
    """The calls of one rank on one group, carried out in the order of their submission.

    Any thread may submit and wait. See Note [Who carries out a call].

    Args:
        timeout: The default limit of a call's waits for other ranks.
        fail: Called with an error after which this rank can't go on with the others.
        call_failed: Called with the error that ends a call halfway. If it is an error of this rank
            alone, the other ranks are at another exchange, and must not take the next call for
            this one. Shown by test_a_rank_that_fails_halfway_spoils_no_later_sum.
    """

    def __init__(
        self,
        timeout: timedelta,
        fail: Callable[[BaseException], None] = lambda error: None,
        call_failed: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        self.timeout = timeout
        self.fail, self.call_failed = fail, call_failed
        self.num_submitted = 0
        self.generation = Generation()
        self.dropped: deque[GroupWork] = deque(maxlen=_MAX_DROPPED)
        self._numbers = itertools.count(1)
        self._calls: deque[GroupWork] = deque()
        self._is_closed = False
        # Held while a call is carried out. Reentrant for calls of a signal handler.
        self._carrying_out = threading.RLock()
        self._runner: int | None = None  # the thread that is in the middle of a call
        self._running: GroupWork | Deadline | None = None  # that call, or its deadline
        self._thread: threading.Thread | None = None  # the queue's own
        self._thread_lock = threading.Lock()
        self._is_watched = False
        self._is_urgent = threading.Event()

    def submit(
        self,
        runs: Sequence[Run],
        results: Sequence[Tensor],
        *,
        is_async: bool,
        timeout: timedelta | None = None,
    ) -> GroupWork:
        """Append a call of ``runs``; unless it ``is_async``, carry it out before returning.

        An option of torch's that isn't set has a negative ``timeout``.
        """
        if timeout is None or timeout < timedelta(0):
            timeout = self.timeout
        if not is_async:
            self.check_thread()
        self.num_submitted = next(self._numbers)
        work = GroupWork(self, runs, results, timeout)
        self._calls.append(work)
        if not is_async:
            self.carry_out_until(work)
        elif self._is_closed:
            self.carry_out_all()
        elif not self._is_watched:
            self._watch()
        return work

    def run(self, run: Run) -> None:
        """Carry out ``run`` in this thread, after the calls before it, and raise its error.

        It does what submitting a call and waiting for it does, with a fraction of the code, which
        a training step finds in no cache.
        """
        self.check_thread()
        if self._carrying_out.acquire(False):
            try:
                generation = self.generation
                if not self._calls and not self._is_closed and generation.error is None:
                    self.num_submitted = next(self._numbers)
                    self._runner = threading.get_ident()
                    self._running = deadline = Deadline(self.timeout.total_seconds())
                    with _InferenceMode(True):
                        run(deadline)
                    return
            except BaseException as error:
                if isinstance(error, CollectiveMismatch):  # of which the caller is told at once
                    generation.error = without_traceback(error)
                    self.end_generation(generation)
                self.call_failed(error)
                raise
            finally:
                self._runner = self._running = None
                self._carrying_out.release()
        self.submit([run], (), is_async=True).wait()

    def end_generation(self, generation: Generation) -> None:
        """Carry out later calls although ``generation`` has failed, as its caller knows by now."""
        if self.generation is generation and generation.error is not None:
            self.generation = Generation()

    def carry_out_until(self, work: GroupWork, end: Deadline = NEVER) -> None:
        """Carry out the calls up to and including ``work``."""
        while not work._is_done:
            # Another thread may be on a later call by then, which this one must not wait for: the
            # other ranks may come to that only after the next call of this thread.
            # Shown by test_a_wait_for_a_call_is_not_one_for_later_calls.
            if self._acquire():
                self._carry_out_next(end, until=work)
            elif not end.left():  # that thread's limit need not be this one's
                running = self._running  # at most work, if that isn't done afterwards
                if running is not None and not work._is_done:
                    running.bring_forward(end)
                    if end.passed() > DEAF_SECONDS:
                        error = unheard(end)
                        self.fail(error)
                        raise error

    def _acquire(self) -> bool:
        if self._carrying_out.acquire(False):
            return True
        with passed_on():  # another thread may wait for other ranks
            return self._carrying_out.acquire(True, _TURN_SECONDS)

    def carry_out_all(self) -> None:
        """Carry out all calls. Those of a group that was closed fail at once."""
        while self._calls:
            self._carrying_out.acquire()
            self._carry_out_next()

    def check_thread(self) -> None:
        """Raise RuntimeError in a thread that is in the middle of a call."""
        if self._runner == threading.get_ident():
            raise RuntimeError(
                "A collective was called while this thread is in the middle of another one of the "
                "same group, by the handler of a signal. Have the handler set a flag, and look at "
                "that between steps; or call it with async_op=True, and wait later."
            )

    def _carry_out_next(self, end: Deadline = NEVER, until: GroupWork | None = None) -> None:
        """Carry out a call, unless ``until`` is done, with the lock held, and release the lock."""
        call: GroupWork | None = None
        try:
            if self._calls and not (until is not None and until._is_done):
                call = self._calls.popleft()
                self._runner = threading.get_ident()
                self._running = call
                call.carry_out(end)
        finally:
            self._runner = self._running = None
            self._carrying_out.release()
            # After the release: callbacks may wait for other calls, which another thread has to
            # carry out then. Shown by test_a_callback_may_wait_for_another_calls_future.
            if call is not None:
                call.tell()

    def hurry(self) -> None:
        """Have the queue's own thread carry out all calls now."""
        self._watch()
        self._is_urgent.set()

    def is_this_thread(self) -> bool:
        """Whether this is the queue's own thread."""
        with self._thread_lock:  # until a thread that has just started is known
            return self._thread is threading.current_thread()

    def _watch(self) -> None:
        """Start the queue's own thread, unless it runs."""
        with self._thread_lock:
            if not self._is_watched and not self._is_closed:
                self._is_watched = True
                self._thread = start_thread(self._carry_out_leftovers, "lockstep-collectives")

    def _carry_out_leftovers(self) -> None:
        num_idle_looks = 0
        while not self._is_closed and num_idle_looks < _MAX_IDLE_LOOKS:
            newest = (self._calls.copy() or [None])[-1]
            is_urgent = self._is_urgent.wait(_GRACE_SECONDS)
            self._is_urgent.clear()
            num_idle_looks = 0 if is_urgent or newest is not None else num_idle_looks + 1
            if is_urgent or (newest is not None and not newest._is_done):
                self.carry_out_all()
        self._is_watched = False
        # A call that came since the last look relied on this thread.
        if self._calls:
            self._watch()

    def let_go(self) -> None:
        """Have the thread end soon. It takes no lock: a garbage collection may call it."""
        self._is_closed = True
        self.dropped.clear()

    def close(self) -> None:
        """End the thread, and wait for its end."""
        with self._thread_lock:
            self._is_closed = True
            thread = self._thread
        self._is_urgent.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join()
