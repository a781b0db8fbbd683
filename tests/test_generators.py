"""Generators of random numbers, read and put back."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.generators import generator_of, global_generators


class OfTheProgram(random.Random):
    """One with attributes."""

    name = "ours"


KINDS: dict[str, tuple[Any, Callable[[Any], float]]] = {
    "torch": (torch.Generator(), lambda rng: torch.rand(1, generator=rng).item()),
    "random": (OfTheProgram(1), lambda rng: rng.gauss(0, 1)),
    "numpy": (np.random.RandomState(1), lambda rng: rng.normal()),
    "numpy's other bits": (np.random.RandomState(np.random.PCG64(1)), lambda rng: rng.normal()),
    "default_rng": (np.random.default_rng(1), lambda rng: rng.normal()),
    "with arrays": (np.random.Generator(np.random.Philox(1)), lambda rng: rng.normal()),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_generator_goes_on_from_what_was_read_or_noted(kind: str) -> None:
    rng, draw = KINDS[kind]
    generator = generator_of(rng)
    assert generator is not None
    for _ in range(3):
        draw(rng)  # an odd number: gauss() and normal() keep the second of a pair
    generator.begin()
    state = json.loads(json.dumps(generator.read()))
    assert not generator.has_drawn()
    drawn = [draw(rng) for _ in range(4)]
    assert generator.has_drawn()
    generator.write(state)
    assert [draw(rng) for _ in range(4)] == drawn
    generator.begin()
    drawn = [draw(rng) for _ in range(4)]
    generator.rewind()
    assert not generator.has_drawn()
    assert [draw(rng) for _ in range(4)] == drawn
    generator.seed(2**40 + 3)
    drawn = [draw(rng) for _ in range(4)]
    generator.seed(2**40 + 3)
    assert [draw(rng) for _ in range(4)] == drawn


def test_the_states_of_global_generators_are_kept() -> None:
    def draw() -> tuple[float, ...]:
        return torch.rand(1).item(), random.gauss(0, 1), np.random.normal()

    draw()
    with global_generators().kept():
        first = draw()
    assert draw() == first


def test_what_has_no_state_is_no_generator() -> None:
    assert generator_of(random.SystemRandom()) is None
    assert generator_of(random) is None
