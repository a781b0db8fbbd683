"""Random numbers that a dataset draws: from generators that it has itself, or from global ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from lockstep.generators import Generator, generator_of, global_generators
from lockstep.same_bits import exclusive

# How deep in a dataset they are looked for, and in containers of how many entries.
_MAX_DEPTH, _MAX_ENTRIES = 6, 64


def generators_in(dataset: Any, known: Sequence[Generator] = ()) -> list[Generator]:
    """Return the generators that ``dataset`` has, apart from those that are ``known``."""
    seen = {id(each.generator) for each in known}
    found = [*map(generator_of, _objects_in(dataset, seen))]
    return [each for each in found if each is not None and _is_on_cpu(each.generator)]


def _is_on_cpu(generator: Any) -> bool:
    return not isinstance(generator, torch.Generator) or generator.device.type == "cpu"


def _objects_in(value: Any, seen: set[int], depth: int = 0) -> Iterator[Any]:
    """Yield ``value`` and what it has, each object once."""
    if id(value) in seen or depth > _MAX_DEPTH or isinstance(value, type):
        return
    seen.add(id(value))
    yield value
    inner: Any = ()
    if isinstance(value, list | tuple | set | dict):
        inner = value.values() if isinstance(value, dict) else value
        inner = inner if len(value) <= _MAX_ENTRIES else ()
    elif not isinstance(value, torch.Tensor):
        inner = getattr(value, "__dict__", {}).values()
    for each in [*inner]:
        yield from _objects_in(each, seen, depth + 1)


class RandomState:
    """States of the global generators for one sample, whichever rank reads it.

    The rest of the program doesn't see them.
    """

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
