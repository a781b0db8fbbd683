"""The seed of the run, which ``lockstep.seed()`` sets, and when ranks begin to differ."""

from __future__ import annotations

from collections.abc import Callable

from lockstep.comm import rank_context
from lockstep.world.world import rank_state


def shares_generators() -> bool:
    """Whether this rank is a thread that has its global generators in common with others."""
    return rank_state().placement is not None and rank_context().launch.turns is None


def set_seed_of_run(number: int, begin_noise: Callable[[], None] | None) -> None:
    """Remember the seed; :func:`begin_local_noise` is to call ``begin_noise``."""
    state = rank_state()
    state.seed, state.begin_noise = number, begin_noise


def seed_of_run() -> int | None:
    """What the program last gave to ``lockstep.seed()`` on this rank, or None."""
    return rank_state().seed


def begin_local_noise() -> None:
    """Let this rank draw other random numbers than the others, if the run has a seed.

    ``parallelize()`` calls it when all ranks have the same model; the first time after each
    ``lockstep.seed()`` counts.
    """
    state = rank_state()
    begin, state.begin_noise = state.begin_noise, None
    if begin is not None:
        begin()
