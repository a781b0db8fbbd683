"""The generators of random numbers that an optimizer may draw from."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from lockstep.comm import bytes_of


class Source(NamedTuple):
    """How to read and set the state of one generator, as JSON can represent it."""

    read: Callable[[], Any]
    write: Callable[[Any], object]


class Generators:
    """The global generators of torch, Python and NumPy, and those that ``optimizer`` has itself."""

    def __init__(self, optimizer: Optimizer) -> None:
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        devices = {str(p.device) for p in parameters if p.device.type != "cpu"}
        self._sources = {"torch": _of_torch(torch.default_generator), "random": _of_python(random)}
        for name in sorted(devices):
            self._sources[name] = _of_device(torch.device(name))
        if (numpy := sys.modules.get("numpy")) is not None:
            self._sources["numpy"] = _of_numpy(numpy.random)
        held = [*vars(optimizer).items()]
        held += [item for group in optimizer.param_groups for item in group.items()]
        for number, (name, value) in enumerate(held):
            if (source := _source_of(value)) is not None:
                self._sources[f"{name} {number}"] = source

    def read(self) -> dict[str, Any]:
        """Return the state of each, as JSON can represent it."""
        return {name: source.read() for name, source in self._sources.items()}

    def write(self, states: dict[str, Any]) -> None:
        """Set the state of each, of those that this rank has too."""
        for name, state in states.items():
            if name in self._sources:
                self._sources[name].write(state)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Put the states back afterwards."""
        before = self.read()
        try:
            yield
        finally:
            self.write(before)


def _source_of(value: object) -> Source | None:
    """Return how to read and set ``value``, if it is a generator of a known class."""
    if isinstance(value, torch.Generator):
        return _of_torch(value)
    if isinstance(value, random.Random):
        return _of_python(value)
    if hasattr(value, "bit_generator"):  # NumPy's Generator
        return _of_numpy_bits(value.bit_generator)
    if type(value).__name__ == "RandomState" and hasattr(value, "get_state"):
        return _of_numpy(value)
    return None


def _of_torch(generator: torch.Generator) -> Source:
    def write(state: str) -> None:
        generator.set_state(_tensor(state))

    return Source(lambda: _hex(generator.get_state()), write)


def _of_device(device: torch.device) -> Source:
    module: Any = torch.get_device_module(device)

    def write(state: str) -> None:
        module.set_rng_state(_tensor(state), device)

    return Source(lambda: _hex(module.get_rng_state(device)), write)


def _hex(state: torch.Tensor) -> str:
    return bytes_of(state).hex()


def _tensor(state: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(state), dtype=torch.uint8)


def _of_python(generator: Any) -> Source:
    def write(state: Any) -> None:
        version, words, gauss = state
        generator.setstate((version, tuple(words), gauss))

    def read() -> Any:
        version, words, gauss = generator.getstate()
        return [version, [*words], gauss]

    return Source(read, write)


def _of_numpy(generator: Any) -> Source:
    def write(state: dict[str, Any]) -> None:
        generator.set_state(state)

    return Source(lambda: _plain(generator.get_state(legacy=False)), write)


def _of_numpy_bits(bits: Any) -> Source:
    def write(state: dict[str, Any]) -> None:
        bits.state = state

    return Source(lambda: _plain(bits.state), write)


def _plain(value: Any) -> Any:
    """Return a state of NumPy's without arrays."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value
