"""Random numbers that a dataset draws: from a seed of each sample, whichever rank reads it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lockstep.generators import global_generators
from lockstep.same_bits import exclusive


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
