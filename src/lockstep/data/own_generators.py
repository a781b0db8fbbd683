"""Generators that a dataset has: in its attributes, or in those of its transforms, say."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from lockstep.data.random_state import Source

# How deep in a dataset they are looked for, and in containers of how many entries.
_MAX_DEPTH, _MAX_ENTRIES = 6, 64


class _Methods(NamedTuple):
    """How a generator's state is read and set, and how it is seeded."""

    state: Callable[[], Any]
    set_state: Callable[[Any], Any]
    seed: Callable[[int], Any]


class _Own:
    """A generator of the program's own."""

    def __init__(self, generator: Any, methods: _Methods) -> None:
        self.generator, self._methods = generator, methods
        self.seed = methods.seed

    def begin(self) -> None:
        self._before = self._methods.state()
        self._bytes = pickle.dumps(self._before)

    def has_drawn(self) -> bool:
        return pickle.dumps(self._methods.state()) != self._bytes

    def rewind(self) -> None:
        self._methods.set_state(self._before)


def sources_in(dataset: Any, known: Sequence[Source] = ()) -> list[Source]:
    """Return the generators that ``dataset`` has, apart from those that are ``known``."""
    seen = {id(source.generator) for source in known if isinstance(source, _Own)}
    found = ((each, _methods_of(each)) for each in _objects_in(dataset, seen))
    return [_Own(each, methods) for each, methods in found if methods is not None]


def _methods_of(value: Any) -> _Methods | None:
    numpy: Any = sys.modules.get("numpy")
    if isinstance(value, torch.Generator):
        is_here = value.device.type == "cpu"
        return _Methods(value.get_state, value.set_state, value.manual_seed) if is_here else None
    if isinstance(value, random.Random):
        has_state = not isinstance(value, random.SystemRandom)
        return _Methods(value.getstate, value.setstate, value.seed) if has_state else None
    if numpy is None:
        return None
    if isinstance(value, numpy.random.RandomState):
        return _Methods(value.get_state, value.set_state, lambda n: value.seed(n % 2**32))
    if isinstance(value, numpy.random.Generator):
        bits: Any = value.bit_generator

        def set_state(state: Any) -> None:
            bits.state = state

        return _Methods(lambda: bits.state, set_state, lambda n: set_state(type(bits)(n).state))
    return None


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
