"""Fixtures of these tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import lockstep
from lockstep.world import set_seed_of_run
from tests.same_bits.runs import one_thread


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    """Seed the run, and leave no seed and no number of threads behind."""
    with one_thread():
        lockstep.seed(3)
        yield
        set_seed_of_run(None, None)  # type: ignore[arg-type]
