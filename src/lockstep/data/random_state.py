"""Random numbers that a dataset draws: from a seed of each sample, whichever rank reads it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lockstep.generators import global_generators

_MASK = 2**64 - 1

# Held while samples are read in this process: ranks that are threads share the generators.
exclusive = threading.RLock()
# As for the locks of logging: a thread that isn't in the child may have held it.
os.register_at_fork(after_in_child=exclusive._at_fork_reinit)  # type: ignore[attr-defined]


def mixed(*numbers: int) -> int:
    """Return a seed from 0 to ``2**63 - 1``, another one for each sequence of whole numbers.

    Source: Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators" (2014).
    """
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


class RandomState:
    """States of all generators for one task, which the rest of the program doesn't see."""

    def __init__(self, seed: int) -> None:
        self._seed: int | None = seed
        self._states: dict[str, Any] = {}

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Let the generators have these states; afterwards they have their former ones again."""
        with exclusive:
            generators = global_generators()
            with generators.kept():
                if self._seed is not None:
                    for each in generators.values():
                        each.seed(self._seed)
                    self._seed = None
                else:
                    generators.write(self._states)
                try:
                    yield
                finally:
                    self._states = generators.read()
