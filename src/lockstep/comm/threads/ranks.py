"""Threads that are ranks: the context of each, and its own record of torch.distributed's groups.

Note [Worlds of threads]: torch.distributed records its groups in one object of a module (in
Python) and in one registry (in C++, by name). While ranks are threads, the first is replaced by
an object that leads to each thread's own record, and the second is switched to one registry for
each thread; both are put back when the last of those threads ends. A thread that isn't a rank
still sees the process's groups, except by name in functional collectives.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch.distributed.distributed_c10d as c10d

from lockstep.deadline import Deadline
from lockstep.torch_private import _set_thread_isolation_mode, _World

T = TypeVar("T")

# Guards the state that rank threads share, and is notified of each change to it. One for all
# groups: the garbage collector may end a rank in any thread, with any of these states locked.
_lock = threading.RLock()
changed = threading.Condition(_lock)
_turn_is_over = threading.Condition(_lock)


class TurnsOfRanks:
    """Lets one rank run at a time, from one wait for the others to the next.

    Args:
        swap: Called when a rank's turn begins, with its number and that of the rank before it (-1
            for none), which has run since: it exchanges what both would have for themselves in
            processes of their own.
    """

    def __init__(self, swap: Callable[[int, int], None]) -> None:
        self._swap = swap
        self._thread: int | None = None  # whose turn it is
        self._rank, self._ranks = -1, dict[int, int]()

    def enter(self, rank: int) -> None:
        """Begin the first turn of ``rank``, which is this thread."""
        self._ranks[threading.get_ident()] = rank
        self._begin()

    def leave(self) -> None:
        """End the last turn of this thread's rank."""
        with changed:
            if self._thread == threading.get_ident():
                self._end()

    @contextmanager
    def passed_on(self, *deadlines: Deadline) -> Iterator[None]:
        """Let other ranks run. What they take when the wait is over counts for no deadline.

        A thread that works for a rank has no turn, and ends none.
        """
        has_turn = self._thread == threading.get_ident()
        if has_turn:
            with changed:
                self._end()
        try:
            yield
        finally:
            if has_turn:
                began = time.monotonic()
                self._begin()
                for each in deadlines:
                    each.delay(time.monotonic() - began)

    def _begin(self) -> None:
        with changed:
            while self._thread is not None:
                _turn_is_over.wait()
            self._thread = threading.get_ident()
            before, self._rank = self._rank, self._ranks[self._thread]
            if before != self._rank:
                self._swap(self._rank, before)

    def _end(self) -> None:
        self._thread = None
        _turn_is_over.notify()


class RankThreads:
    """The rank threads of one launch.

    Attributes:
        failure: Why the ranks can't all join a further group, or None.
        contexts: The contexts of the threads.
        turns: Lets one of them run at a time; None if all may.
    """

    def __init__(self, turns: TurnsOfRanks | None = None) -> None:
        self.failure: str | None = None
        self.contexts: list[_Context] = []
        self.turns = turns

    def fail(self, reason: str) -> None:
        """End all waits for ranks to join a new group."""
        with changed:
            self.failure = reason
            changed.notify_all()

    def interrupt(self, reason: str) -> None:
        """End all waits of ranks for each other."""
        self.fail(reason)
        for context in self.contexts:
            context.end(f"is no longer waited for. {reason}")


class _Context:
    """The context of a thread, which the threads that work for it share.

    Attributes:
        ident: The thread's own.
        memberships: The thread's transports, one for each group that it is a rank of.
        world: torch.distributed's record of its groups; None: that of the process.
        launch: The rank threads of the same launch; none if the thread isn't of a launch.
        init_state: The state of ``init()`` for this rank; None: that of the process.
    """

    def __init__(self) -> None:
        self.ident = threading.get_ident()
        self._process = os.getpid()
        self.memberships: weakref.WeakSet[Any] = weakref.WeakSet()
        self.world: _RankWorld | None = None
        self.launch = RankThreads()
        self.init_state: Any = None

    def add(self, transport: Any) -> None:
        """Add a transport of the thread, whose ``die()`` is called when the thread ends."""
        with changed:
            self.memberships.add(transport)

    def end(self, how: str) -> None:
        """Have the other ranks lose this one, in every group that it hasn't left."""
        if not self.memberships:  # at the exit of the interpreter, which may have no lock any more
            return
        if self._process != os.getpid():  # a forked child, where another thread may hold the lock
            return
        with changed:
            for membership in list(self.memberships):
                membership.die(how)


_ENDED = "is gone. Its thread ended: what it raised, if anything, tells why."


class _Current(threading.local):
    """The context of the current thread; it ends when the thread that it was made in ends."""

    def __init__(self) -> None:
        self.context = _Context()
        self._end = _ThreadEnd(self.context)


class _ThreadEnd:
    """Ends a context with the thread-local storage that alone refers to this object."""

    def __init__(self, context: _Context) -> None:
        self._context = context

    def __del__(self) -> None:
        self._context.end(_ENDED)


_current = _Current()


def rank_context() -> _Context:
    """Return the context of this thread, or of the thread that it works for."""
    return _current.context


def of_this_rank(target: Callable[[], T]) -> Callable[[], T]:
    """Return ``target`` for another thread, where it runs in the context of this thread.

    Callbacks of futures run in such threads, and ask for their rank. Shown by
    test_a_callback_knows_its_rank.
    """
    known = rank_context()

    def run() -> T:
        before, _current.context = _current.context, known
        try:
            return target()
        finally:
            _current.context = before

    return run


def passed_on(*deadlines: Deadline) -> AbstractContextManager[None]:
    """Let other ranks run, in a wait for them, if one rank runs at a time."""
    turns = rank_context().launch.turns
    return nullcontext() if turns is None else turns.passed_on(*deadlines)


def this_thread() -> int:
    """Return a number that differs between threads, but not from those that they work for."""
    return rank_context().ident


def end_this_rank() -> None:
    """Have the other ranks lose this thread now, in every group that it hasn't left."""
    rank_context().end(_ENDED)


class _RankWorld(_World):
    """torch.distributed's record of the groups of one rank."""

    # In the base class these are properties that lead to the module's own.
    pg_map: Any = None
    pg_names: Any = None
    pg_group_ranks: Any = None
    pg_backend_config: Any = None
    group_count: Any = 0
    tags_to_pg: Any = None
    pg_to_tag: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.pg_map, self.pg_names, self.pg_group_ranks = {}, {}, {}
        self.pg_backend_config, self.tags_to_pg, self.pg_to_tag = {}, {}, {}


class _WorldOfThread:
    """In a rank's thread the rank's record, in any other the process's."""

    def __init__(self, of_process: _World) -> None:
        self.__dict__["_of_process"] = of_process

    def _present(self) -> object:
        return rank_context().world or self.__dict__["_of_process"]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._present(), name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._present(), name, value)


class _Isolation:
    """While threads have entered it, each thread has its own record of groups."""

    _num_ranks = 0
    _before: tuple[Any, Any]

    def __enter__(self) -> None:
        with changed:
            if self._num_ranks == 0:
                # init_process_group puts a hook of its own before the one that it finds.
                self._before = c10d._world, sys.excepthook
                c10d._world = _WorldOfThread(c10d._world)  # type: ignore[assignment]
                _set_thread_isolation_mode(True)
            self._num_ranks += 1

    def __exit__(self, *_: object) -> None:
        with changed:
            self._num_ranks -= 1
            if self._num_ranks == 0:
                c10d._world, sys.excepthook = self._before
                _set_thread_isolation_mode(False)


_isolation = _Isolation()


@contextmanager
def a_rank_of(launch: RankThreads) -> Iterator[None]:
    """Make this thread a rank: it has groups of its own in torch.distributed, and sees no others.

    See Note [Worlds of threads].
    """
    context = rank_context()
    launch.contexts.append(context)
    with _isolation:
        context.world, context.launch = _RankWorld(), launch
        try:
            yield
        finally:
            context.world, context.launch = None, RankThreads()
