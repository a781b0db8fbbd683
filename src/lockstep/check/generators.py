"""The states of the generators that programs draw random numbers from without a word."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

from lockstep.data import bytes_of


def random_state() -> tuple[Any, ...]:
    """The states of all generators that programs draw from without a word."""
    numpy = sys.modules.get("numpy")
    return (
        torch.get_rng_state(),
        random.getstate(),
        None if numpy is None else numpy.random.get_state(legacy=False),
    )


def set_random_state(state: tuple[Any, ...]) -> None:
    """Set the generators to what ``random_state()`` returned, in another process maybe."""
    torch.set_rng_state(state[0])
    random.setstate(state[1])
    if state[2] is not None and (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.set_state(state[2])


def have_drawn(before: tuple[Any, ...], after: tuple[Any, ...]) -> bool:
    """Whether numbers were drawn between two states of the generators."""
    return _comparable(before) != _comparable(after)


def _comparable(state: tuple[Any, ...]) -> tuple[Any, ...]:
    numpy = state[2] or {"state": {"key": b"", "pos": 0}}
    inner = numpy["state"]
    key = inner["key"].tobytes() if hasattr(inner.get("key"), "tobytes") else repr(inner)
    return bytes_of(state[0]), state[1], key, inner.get("pos")
