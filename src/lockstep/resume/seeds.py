"""Random numbers of a step: from the run's seed, the step and the rank alone."""

from __future__ import annotations

from lockstep.generators import Seeds, mixed
from lockstep.world import seed_accelerators

# Apart from other seeds that are mixed of a seed and two numbers.
_STEPS = -4


def seed_step(seed: int, step: int, rank: int, seeds: Seeds | None = None) -> None:
    """Seed all global generators for a step.

    Args:
        seed: That of the run.
        step: The number of the step.
        rank: The rank.
        seeds: What seeds them, if there is one.
    """
    number = mixed(seed, step, rank, _STEPS)
    (seeds or Seeds()).put(number)
    seed_accelerators(number)
