"""Ranks that are threads of one process: each has a place, and a World, of its own."""

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

_of_thread = threading.local()


@dataclass
class ThreadPlace:
    """What ``init()`` goes by in such a thread, where another process has its environment.

    Attributes:
        placement: Which rank it is.
        store: Where all ranks of the launch meet.
        num_inits: How often it has joined them.
        world: What ``init()`` returned last.
    """

    placement: Placement
    store: dist.Store
    num_inits: int = 0
    world: World | None = None


def place_of_this_thread() -> ThreadPlace | None:
    """The place that this thread has as a rank, or None if it isn't one."""
    return getattr(_of_thread, "place", None)


@contextmanager
def in_place(placement: Placement, store: dist.Store) -> Iterator[None]:
    """Have ``init()`` in this thread join the others of ``store`` as the rank that is given."""
    _of_thread.place = ThreadPlace(placement, store)
    try:
        yield
    finally:
        del _of_thread.place


def of_this_place(target: Callable[[], T]) -> Callable[[], T]:
    """Let ``target``, which another thread runs, have the place of this one."""
    place = place_of_this_thread()
    if place is None:
        return target

    def run() -> T:
        _of_thread.place = place
        try:
            return target()
        finally:
            del _of_thread.place

    return run
