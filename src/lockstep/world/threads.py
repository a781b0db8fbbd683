"""The state of ``init()``: one in a process, and one in each thread that is a rank."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch.distributed as dist

from lockstep.world.environment import Placement

if TYPE_CHECKING:
    from lockstep.world.world import World

T = TypeVar("T")


@dataclass
class RankContext:
    """The state of ``init()`` for one rank."""

    placement: Placement | None = None  # None for a process, whose environment tells it
    store: dist.Store | None = None  # where the threads of a launch meet
    num_inits: int = 0  # how often it has joined the others
    world: World | None = None  # the last result of init(), of the group that was default then

    def new_prefix(self) -> str:
        """A prefix for keys in a store, which outlives the groups whose ranks meet there."""
        self.num_inits += 1
        return f"lockstep/init/{self.num_inits}"


_of_process = RankContext()
_of_thread = threading.local()


def this_rank() -> RankContext:
    """The context of this thread if it is a rank, else that of the process."""
    return getattr(_of_thread, "context", _of_process)


@contextmanager
def as_rank(placement: Placement, store: dist.Store) -> Iterator[None]:
    """Let ``init()`` in this thread join the others at ``store`` as the rank of ``placement``."""
    with _using(RankContext(placement, store)):
        yield


def of_this_place(target: Callable[[], T]) -> Callable[[], T]:
    """Let ``target``, which another thread runs, have the context of this thread's rank."""
    context = this_rank()

    def run() -> T:
        with _using(context):
            return target()

    return run if context is not _of_process else target


@contextmanager
def _using(context: RankContext) -> Iterator[None]:
    _of_thread.context = context
    try:
        yield
    finally:
        del _of_thread.context
