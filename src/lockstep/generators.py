"""Generators of random numbers: the global ones of torch, Python and NumPy, and others."""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from lockstep.comm import bytes_of

# The bytes of the state of a Mersenne Twister: 624 words and a position.
_TWISTER_BYTES = 2500
# Of most attributes of modules, among which a guarded step looks for generators each time.
_FREQUENT = {bool, int, float, str, tuple, list, set, dict, OrderedDict, type(None), torch.Tensor}
_MASK = 2**64 - 1


class Generator(ABC):
    """A generator whose state can be read and set, or noted and put back."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator

    @abstractmethod
    def read(self) -> Any:
        """Return the state, of values that JSON has; equal ones give the same numbers."""

    @abstractmethod
    def write(self, state: Any) -> None:
        """Set the state to one that was read, in another process maybe."""

    @abstractmethod
    def seed(self, seed: int) -> None:
        """Seed the generator."""

    def begin(self) -> None:
        """Note the state."""
        self._before = self._now()

    def has_drawn(self) -> bool:
        """Whether a number was drawn since :meth:`begin`."""
        return bool(self._now() != self._before)

    def rewind(self) -> None:
        """Set the generator to its state at :meth:`begin`."""
        self._put(self._before)

    # These two take a hundredth of the time that reading and writing takes: a loader calls them for
    # every batch.
    def _now(self) -> Any:
        return self.read()

    def _put(self, state: Any) -> None:
        self.write(state)


class _Torch(Generator):
    def read(self) -> Any:
        return self._now().hex()

    def write(self, state: Any) -> None:
        self._put(bytes.fromhex(state))

    def seed(self, seed: int) -> None:
        self.generator.manual_seed(seed)

    def _now(self) -> bytes:
        state = self.generator.get_state()  # kept while its memory is read
        return bytes(bytes_of(state))

    def _put(self, state: bytes) -> None:
        self.generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


class _Python(Generator):
    # getstate() makes 625 numbers of a state whose bytes follow the header of the object in memory.
    # Where they don't, it has to do.
    def __init__(self, generator: random.Random) -> None:
        super().__init__(generator)
        self._address = id(generator) + object.__basicsize__
        self._has_address = self._now() == self._told()

    def read(self) -> Any:
        twister, gauss = self._now()
        return [twister.hex(), gauss]

    def write(self, state: Any) -> None:
        self._put((bytes.fromhex(state[0]), state[1]))

    def seed(self, seed: int) -> None:
        self.generator.seed(seed)

    _has_address = True

    def _now(self) -> tuple[bytes, float | None]:
        if not self._has_address:
            return self._told()
        # The second of a pair that gauss() drew is kept elsewhere.
        return ctypes.string_at(self._address, _TWISTER_BYTES), self.generator.gauss_next

    def _told(self) -> tuple[bytes, float | None]:
        _, words, gauss = self.generator.getstate()
        return struct.pack("625I", words[-1], *words[:-1]), gauss

    def _put(self, state: tuple[bytes, float | None]) -> None:
        twister, self.generator.gauss_next = state
        if self._has_address:
            ctypes.memmove(self._address, twister, _TWISTER_BYTES)
        else:
            position, *words = struct.unpack("625I", twister)
            self.generator.setstate((self.generator.VERSION, (*words, position), state[1]))


class _NumPy(Generator):
    """NumPy's global generator, or another of its class."""

    _draws = True  # until it is known
    _whole: Any = None

    def read(self) -> Any:
        return _plain(self.generator.get_state(legacy=False))

    def write(self, state: Any) -> None:
        self.generator.set_state(state)

    def seed(self, seed: int) -> None:
        if self._is_twister():
            self.generator.seed(seed % 2**32)
        else:  # its own seed() can't
            bits = type(self._bits())(seed)
            self.write(type(self.generator)(bits).get_state(legacy=False))

    def begin(self) -> None:
        super().begin()
        # The second of a pair that normal() drew is kept elsewhere, where read() alone finds it.
        self._whole = self.read() if self._draws else None

    def has_drawn(self) -> bool:
        self._draws = super().has_drawn()
        return self._draws

    def rewind(self) -> None:
        if self._whole is None:
            super().rewind()
        else:
            self.write(self._whole)

    def _now(self) -> Any:
        if not self._is_twister():
            return self.read()
        return ctypes.string_at(self._bits().ctypes.state_address, _TWISTER_BYTES)

    def _put(self, state: Any) -> None:
        if isinstance(state, bytes):
            ctypes.memmove(self._bits().ctypes.state_address, state, _TWISTER_BYTES)
        else:
            self.write(state)

    def _is_twister(self) -> bool:
        return type(self._bits()).__name__ == "MT19937"

    def _bits(self) -> Any:
        return self.generator._bit_generator  # numpy.random.set_bit_generator() replaces it


class _NumPyBits(Generator):
    """A ``numpy.random.Generator``."""

    def read(self) -> Any:
        return _plain(self.generator.bit_generator.state)

    def write(self, state: Any) -> None:
        self.generator.bit_generator.state = state

    def seed(self, seed: int) -> None:
        bits = self.generator.bit_generator
        bits.state = type(bits)(seed).state


def _plain(value: Any) -> Any:
    """Return a state of NumPy's without arrays."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value


def generator_of(value: object) -> Generator | None:
    """Return how to use ``value``, if it is a generator of a known class."""
    if isinstance(value, torch.Generator):
        return _Torch(value)
    if isinstance(value, random.Random):
        # One of another kind, such as the system's, may have no state.
        return _Python(value) if type(value).getstate is random.Random.getstate else None
    if (numpy := _numpy_random()) is not None:
        if isinstance(value, numpy.RandomState):
            return _NumPy(value)
        if isinstance(value, numpy.Generator):
            return _NumPyBits(value)
    return None


def generator_of_device(device: torch.device) -> Generator:
    """Return the default generator of another device than the CPU."""
    module: Any = torch.get_device_module(device)
    which = () if device.type == "mps" else (device,)  # there is one alone
    get, put = partial(module.get_rng_state, *which), module.set_rng_state
    return _Torch(SimpleNamespace(get_state=get, set_state=lambda state: put(state, *which)))


def _numpy_random() -> Any:
    return getattr(sys.modules.get("numpy"), "random", None)


class Generators(dict[str, Generator]):
    """Several generators, by name."""

    def read(self) -> dict[str, Any]:
        """Return the state of each, of values that JSON has."""
        return {name: generator.read() for name, generator in self.items()}

    def write(self, states: Mapping[str, Any]) -> None:
        """Set the state of each, of those that there are here too."""
        for name, state in states.items():
            if name in self:
                self[name].write(state)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Put the states back afterwards."""
        before = self.read()
        try:
            yield
        finally:
            self.write(before)


def global_generators() -> Generators:
    """Return those of torch (for the CPU) and of Python; and of NumPy, if it is imported."""
    python: Any = random.random
    found = Generators(torch=_Torch(torch.default_generator), random=_Python(python.__self__))
    if (numpy := _numpy_random()) is not None:
        found["numpy"] = _NumPy(numpy.get_state.__self__)
    return found


def generators_of(parameters: Iterable[torch.Tensor], *owners: Mapping[str, Any]) -> Generators:
    """Return those of devices with ``parameters``, and those among the values of ``owners``.

    The generator of the CPU is among the global ones.
    """
    found = Generators()
    for name in sorted(str(each) for each in {p.device for p in parameters} if each.type != "cpu"):
        found[name] = generator_of_device(torch.device(name))
    for number, owner in enumerate(owners):
        if _FREQUENT.issuperset(map(type, owner.values())):
            continue
        for name, value in owner.items():
            if type(value) not in _FREQUENT and (generator := generator_of(value)) is not None:
                found[f"{name} {number}"] = generator
    return found


class Seeds:
    """Seeds the global generators of Python, NumPy and torch."""

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
