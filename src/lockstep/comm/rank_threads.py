"""Threads that are ranks: what torch.distributed keeps once in a process, each has for itself.

Note [Worlds of threads]: torch.distributed records its groups in one object of a module (in
Python) and in one registry (in C++, by name). While ranks are threads, the first is replaced by
one that stands for each thread's own, and the second is switched to one for each thread; both
are put back when the last of those threads ends. A thread that isn't a rank still sees the
process's groups, except by name in functional collectives.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import torch.distributed.distributed_c10d as c10d

from lockstep.torch_private import _set_thread_isolation_mode, _World

T = TypeVar("T")

_of_thread = threading.local()
_installing = threading.Lock()
_num_ranks = 0
_before: tuple[Any, Any] | None = None


class _Gathering(Protocol):
    """Where ranks wait for each other."""

    def give_up(self, reason: str) -> None:
        """Wait no longer for ranks to come in."""

    def close(self, reason: str) -> None:
        """Wait no longer for anything."""


class RankThreads:
    """The rank threads of one launch."""

    def __init__(self) -> None:
        self._gatherings: weakref.WeakSet[_Gathering] = weakref.WeakSet()
        self._failure: str | None = None
        self._lock = threading.Lock()

    def watch(self, gathering: _Gathering) -> None:
        """Have ``gathering`` give up when a rank fails, or at once if one has."""
        with self._lock:
            self._gatherings.add(gathering)
            failure = self._failure
        if failure is not None:
            gathering.give_up(failure)

    def fail(self, reason: str) -> None:
        """No rank may wait any more for others to come to a new group."""
        with self._lock:
            self._failure = reason
            gatherings = list(self._gatherings)
        for gathering in gatherings:
            gathering.give_up(reason)

    def interrupt(self, reason: str) -> None:
        """No rank may wait any more for another."""
        self.fail(reason)
        with self._lock:
            gatherings = list(self._gatherings)
        for gathering in gatherings:
            gathering.close(reason)


class _RanksWorld(_World):
    """torch.distributed's record of the groups that one rank is in."""

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


class _EachThreadsWorld:
    """In a rank's thread that rank's record, in any other that of the process."""

    def __init__(self, of_process: _World) -> None:
        self.__dict__["_of_process"] = of_process

    def _present(self) -> object:
        return getattr(_of_thread, "world", self.__dict__["_of_process"])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._present(), name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._present(), name, value)


def this_crowd() -> RankThreads | None:
    """The crowd that this thread is a rank of, if it is one."""
    return getattr(_of_thread, "crowd", None)


@contextmanager
def a_rank_of(crowd: RankThreads) -> Iterator[None]:
    """Be a rank in this thread: torch.distributed knows its groups only, and it alone knows them.

    See Note [Worlds of threads].
    """
    _install()
    _of_thread.world, _of_thread.crowd = _RanksWorld(), crowd
    try:
        yield
    finally:
        del _of_thread.world, _of_thread.crowd
        _uninstall()


def of_this_rank(target: Callable[[], T]) -> Callable[[], T]:
    """Let ``target``, which another thread runs, see torch.distributed as this thread does.

    Futures' callbacks run in such threads, and ask for their rank. Shown by
    test_a_callback_knows_its_rank.
    """
    known = {"ident": this_thread(), **_of_thread.__dict__}

    def run() -> T:
        before = dict(_of_thread.__dict__)
        _of_thread.__dict__.update(known)
        try:
            return target()
        finally:
            _of_thread.__dict__.clear()
            _of_thread.__dict__.update(before)

    return run


def this_thread() -> int:
    """What tells this thread from others, but not from those that work for it."""
    return getattr(_of_thread, "ident", threading.get_ident())


def _install() -> None:
    global _num_ranks, _before
    with _installing:
        if _num_ranks == 0:
            # init_process_group puts a hook of its own before the one that it finds.
            _before = c10d._world, sys.excepthook
            c10d._world = _EachThreadsWorld(c10d._world)  # type: ignore[assignment]
            _set_thread_isolation_mode(True)
        _num_ranks += 1


def _uninstall() -> None:
    global _num_ranks, _before
    with _installing:
        _num_ranks -= 1
        if _num_ranks == 0:
            assert _before is not None
            c10d._world, sys.excepthook = _before
            _before = None
            _set_thread_isolation_mode(False)
