"""The state of ``init()``: one in a process, and one in each thread that is a rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist

from lockstep.comm import rank_context
from lockstep.world.environment import Placement

if TYPE_CHECKING:
    from lockstep.world.world import World


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


def this_rank() -> RankContext:
    """The context of this thread if it is a rank, else that of the process."""
    state: RankContext | None = rank_context().init_state
    return _of_process if state is None else state


@contextmanager
def as_rank(placement: Placement, store: dist.Store) -> Iterator[None]:
    """Let ``init()`` in this thread join the others at ``store`` as the rank of ``placement``."""
    own = rank_context()
    own.init_state = RankContext(placement, store)
    try:
        yield
    finally:
        own.init_state = None
