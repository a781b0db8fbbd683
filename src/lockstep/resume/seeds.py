"""Random numbers of a step: from the run's seed, the step and the rank alone."""

from __future__ import annotations

import sys
from typing import Any

import torch

from lockstep.generators import Generators, global_generators, mixed
from lockstep.world import accelerator

# Apart from other seeds that are mixed of a seed and two numbers.
_STEPS = -4


class Seeds:
    """Seeds Python's, NumPy's and torch's global generators, those of all devices in use too."""

    def __init__(self) -> None:
        self._generators: Generators | None = None  # to find them takes longer than to seed them
        self._has_numpy = False

    def put(self, number: int) -> None:
        """Seed them all."""
        if self._generators is None or self._has_numpy != ("numpy" in sys.modules):
            self._has_numpy = "numpy" in sys.modules
            self._generators = global_generators()
        for generator in self._generators.values():
            generator.seed(number)


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
    if (kind := accelerator()) is not None:
        module: Any = torch.get_device_module(kind)
        if getattr(module, "is_initialized", lambda: True)():
            getattr(module, "manual_seed_all", module.manual_seed)(number)
