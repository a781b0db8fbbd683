"""Worker threads, which take over the caller's modes and share its intra-op threads."""

from __future__ import annotations

import contextvars
import ctypes
import functools
import os
import queue
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeGuard, TypeVar

import torch

from lockstep.comm import of_this_rank
from lockstep.torch_private import DeviceContext, _get_current_function_mode_stack

_LOOK_SECONDS = 0.1  # between looks for a signal that has come
_SOFT = 1  # omp_pause_soft of OpenMP 5.0, which keeps the program's settings
T = TypeVar("T")
Queue = queue.SimpleQueue[Callable[[], None] | None]


def nothing() -> None:
    """Do nothing."""


class WorkerThreads:
    """The caller's thread and ``count - 1`` others, which share the caller's intra-op threads.

    The others start with the first task, and end when this object is closed or freed.
    """

    def __init__(self, count: int) -> None:
        self._queues = [Queue() for _ in range(count - 1)]
        self._num_threads = 0
        self._pid = -1  # of the process in which they were started
        # Held while tasks run: callers in several threads would change the same replicas.
        self.lock = threading.RLock()
        self.close = weakref.finalize(self, _end, self._queues)

    @contextmanager
    def sharing(self) -> Iterator[None]:
        """Share the caller's intra-op threads among all threads, around :meth:`run`."""
        if self._pid != os.getpid():  # also in a forked process, which has no threads of these
            self._num_threads = 0
            self._queues[:] = [Queue() for _ in self._queues]
            for number, tasks_of_one in enumerate(self._queues, start=1):
                name = f"lockstep-replica-{number}"
                threading.Thread(target=_work, args=(tasks_of_one,), name=name, daemon=True).start()
            self._pid = os.getpid()
        each = max(1, torch.get_num_threads() // (1 + len(self._queues)))
        if each != self._num_threads:
            self._num_threads = each
            others: list[Callable[[], None]] = [partial(_set_num_threads, each)]
            self.run([nothing, *others * len(self._queues)])
        # After an operation, OpenMP's threads spin (in GNU's for 20 ms) and would take cores from
        # replicas. So they are ended here; the next operation starts new ones.
        mine, pause = torch.get_num_threads(), _pause()
        if pause is not None:
            pause(_SOFT)
        # For this thread, and as the initial value in new threads.
        torch.set_num_threads(each)
        try:
            yield
        finally:
            torch.set_num_threads(mine)

    def run(
        self, tasks: Sequence[Callable[[], T]], meanwhile: Callable[[], object] = nothing
    ) -> list[Future[T]]:
        """Run each task in its own thread, with the caller's modes, and wait for all of them.

        The caller's thread runs the first task, and then ``meanwhile``.
        """
        futures = [Future[T]() for _ in tasks]
        for tasks_of_one, future, task in zip(self._queues, futures[1:], tasks[1:], strict=False):
            tasks_of_one.put(partial(_fulfil, future, as_this_thread(task)))
        try:
            _fulfil(futures[0], tasks[0])
            meanwhile()
        finally:
            _wait_whatever_comes(futures[1:])
        return futures


def wait_for(futures: Sequence[Future[T]]) -> None:
    """Wait for all, but not beyond Ctrl-C.

    If another thread takes its signal, this one would wait on, and not run the handler.
    """
    while wait(futures, _LOOK_SECONDS).not_done:
        pass


def _wait_whatever_comes(futures: Sequence[Future[T]]) -> None:
    """Wait for all, even after Ctrl-C: threads must not write to tensors of the next call."""
    interruption: KeyboardInterrupt | None = None
    while not all(future.done() for future in futures):
        try:
            wait_for(futures)
        except KeyboardInterrupt as error:
            interruption = error
    if interruption is not None:
        raise interruption


def _fulfil(future: Future[T], task: Callable[[], T]) -> None:
    try:
        future.set_result(task())
    except BaseException as error:  # which the caller raises
        if future.done():  # the interruption came after the result
            raise
        future.set_exception(error)


def _set_num_threads(count: int) -> None:
    # Without this call, a thread's first operation would overwrite the number.
    torch.get_num_threads()
    torch.set_num_threads(count)


def _work(tasks: Queue) -> None:
    while (task := tasks.get()) is not None:
        task()
        del task  # or its tensors would stay alive while this thread waits


def _end(queues: Sequence[Queue]) -> None:
    for tasks in queues:
        tasks.put(None)


def is_interruption(error: BaseException | None) -> TypeGuard[BaseException]:
    """Whether ``error`` is to end the program, as Ctrl-C and ``sys.exit()`` do."""
    return error is not None and not isinstance(error, Exception)


def raise_first(errors: Sequence[BaseException | None], devices: Sequence[object]) -> None:
    """Raise the error of the first failed replica, if any, with a note on each failed replica."""
    failed = [(i, error) for i, error in enumerate(errors) if error is not None]
    if failed:
        first, error = failed[0]
        error.add_note(f"(raised in replica {first} on {devices[first]})")
        for index, other in failed[1:]:
            trace = "".join(traceback.format_exception(other)).rstrip()
            error.add_note(f"Replica {index} on {devices[index]} failed as well:\n{trace}")
        raise error


# The state of the caller's thread that a task takes over


class Modes(NamedTuple):
    """The modes of a thread: autograd's, autocast's dtype by kind of device, default devices."""

    grad: bool
    inference: bool
    autocasts: dict[str, torch.dtype]
    keeps_casts: bool
    devices: list[torch.device]

    @classmethod
    def here(cls) -> Modes:
        """The modes of this thread."""
        accelerator = torch.accelerator.current_accelerator()
        kinds = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
        modes = _get_current_function_mode_stack()
        return cls(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            {k: torch.get_autocast_dtype(k) for k in kinds if torch.is_autocast_enabled(k)},
            torch.is_autocast_cache_enabled(),
            [mode.device for mode in modes if isinstance(mode, DeviceContext)],
        )

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Enter these modes in a thread that has entered none."""
        with ExitStack() as entered:
            if self.inference:
                entered.enter_context(torch.inference_mode())
            entered.enter_context(torch.set_grad_enabled(self.grad))
            for kind, dtype in self.autocasts.items():
                entered.enter_context(torch.autocast(kind, dtype, cache_enabled=self.keeps_casts))
            for device in self.devices:
                entered.enter_context(torch.device(device))
            yield


def as_this_thread(task: Callable[[], T]) -> Callable[[], T]:
    """Return ``task`` for another thread, with modes, context variables and rank of this one."""
    modes, context = Modes.here(), contextvars.copy_context()

    def run() -> T:
        with modes.entered():
            return context.run(task)

    return of_this_rank(run)


@functools.cache
def _pause() -> Callable[[int], int] | None:
    """Return ``omp_pause_resource_all`` of torch's OpenMP library, if it has that function."""
    for library in (None, str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")):
        with suppress(OSError, AttributeError):
            pause: Callable[[int], int] = ctypes.CDLL(library).omp_pause_resource_all
            return pause
    return None
