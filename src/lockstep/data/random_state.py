"""Random numbers that a dataset draws: from a seed of each sample, whichever rank reads it.

On a CPU there are three global generators: those of torch, of ``random`` and of NumPy. What a
dataset has besides is in own_generators.py.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import random
import struct
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

_MASK = 2**64 - 1
# The number of bytes of the state of NumPy's MT19937: 624 words and a position.
_NUMPY_BYTES = 2500
# The same of Python's: a position and 624 words.
_PYTHON_BYTES = 2500
_GLOBAL_RANDOM: Any = random.random.__self__  # type: ignore[attr-defined]


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


class Source(Protocol):
    """A global generator, and whether its numbers are drawn while samples are read."""

    def begin(self) -> None:
        """Note the state of the generator."""

    def has_drawn(self) -> bool:
        """Whether a number was drawn since :meth:`begin`."""

    def rewind(self) -> None:
        """Set the generator to its state at :meth:`begin`."""

    def seed(self, seed: int) -> None:
        """Seed the generator."""


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a contiguous tensor on the CPU, also where there is no NumPy.

    To compare two takes a fifth of the time that ``torch.equal()`` takes.
    """
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


class _Torch:
    def begin(self) -> None:
        self._before = torch.get_rng_state()

    def has_drawn(self) -> bool:
        return bytes_of(torch.get_rng_state()) != bytes_of(self._before)

    def rewind(self) -> None:
        torch.set_rng_state(self._before)

    def seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)


class _Random:
    # getstate() takes longer than reading many a batch: it makes 625 numbers of a state whose bytes
    # follow the header of the object in memory. Where they don't, it has to do.
    def __init__(self) -> None:
        self._address: int | None = id(_GLOBAL_RANDOM) + object.__basicsize__
        words = _GLOBAL_RANDOM.getstate()[1]
        if self._now() != struct.pack("625I", words[-1], *words[:-1]):
            self._address = None

    def begin(self) -> None:
        self._before, self._gauss_next = self._now(), _GLOBAL_RANDOM.gauss_next

    def has_drawn(self) -> bool:
        return bool(self._now() != self._before)

    def rewind(self) -> None:
        _GLOBAL_RANDOM.gauss_next = self._gauss_next  # the second of a pair that gauss() drew
        if self._address is None:
            random.setstate(self._before)
        else:
            ctypes.memmove(self._address, self._before, _PYTHON_BYTES)

    def _now(self) -> Any:
        if self._address is None:
            return random.getstate()
        return ctypes.string_at(self._address, _PYTHON_BYTES)

    def seed(self, seed: int) -> None:
        random.seed(seed)


class _NumPy:
    def __init__(self, numpy: Any) -> None:
        self._random = numpy.random

    def begin(self) -> None:
        generator = self._random.get_bit_generator()
        self._address = None
        if type(generator).__name__ == "MT19937":
            self._address = generator.ctypes.state_address
        self._before = self._now()

    def has_drawn(self) -> bool:
        return bool(self._now() != self._before)

    def rewind(self) -> None:
        if self._address is None:
            self._random.get_bit_generator().state = pickle.loads(self._before)
        else:
            ctypes.memmove(self._address, self._before, _NUMPY_BYTES)

    def seed(self, seed: int) -> None:
        self._random.seed(seed % 2**32)

    def _now(self) -> Any:
        if self._address is None:
            return pickle.dumps(self._random.get_bit_generator().state)
        return ctypes.string_at(self._address, _NUMPY_BYTES)


def sources() -> list[Source]:
    """Return the generators; NumPy's if it is imported."""
    found: list[Source] = [_Torch(), _Random()]
    if (numpy := sys.modules.get("numpy")) is not None and hasattr(numpy, "random"):
        found.append(_NumPy(numpy))
    return found


class RandomState:
    """States of all generators for one task, which the rest of the program doesn't see."""

    def __init__(self, seed: int) -> None:
        self._seed: int | None = seed
        self._states: tuple[Any, ...] = ()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Let the generators have these states; afterwards they have their former ones again."""
        with exclusive:
            before = _states()
            if self._seed is not None:
                for source in sources():
                    source.seed(self._seed)
                self._seed = None
            else:
                _restore(self._states)
            try:
                yield
            finally:
                self._states = _states()
                _restore(before)


def _states() -> tuple[Any, ...]:
    numpy = sys.modules.get("numpy")
    return torch.get_rng_state(), random.getstate(), numpy and numpy.random.get_state()


def _restore(states: tuple[Any, ...]) -> None:
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    if states[2] is not None:
        sys.modules["numpy"].random.set_state(states[2])
