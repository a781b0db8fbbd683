"""How many random examples are tried, and which of many combinations."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Sequence
from typing import TypeVar

import pytest
from hypothesis import settings

T = TypeVar("T")

# How many mutations of a file are tried in ``make test-long``; ``make test-mutations`` sets more.
NUM_MUTATIONS = int(os.environ.get("NUM_MUTATIONS", "300"))

# How many examples Hypothesis tries by itself: half of what is its own default, and a tenth.
LONG, SHORT = 50, 10


def is_long() -> bool:
    """Whether this is ``make test-long``."""
    return settings.default.max_examples == LONG


def num_examples(count: int, soon: int | None = None) -> int:
    """Half of ``count`` in ``make test-long``, and ``soon`` or a tenth in ``make test``."""
    share = settings.default.max_examples
    return soon if soon is not None and not is_long() else count * share // 100


def some(cases: Iterable[T], first: int) -> list[T]:
    """All ``cases`` in ``make test-long``, and in ``make test`` every third, from one of three."""
    return list(cases) if is_long() else list(cases)[first % 3 :: 3]


def a_third(names: str, cases: Iterable[object], first: int = 0) -> pytest.MarkDecorator:
    """Parametrize a test with ``cases``; ``make test`` runs every third, from one of three."""
    names, marks = [name.strip() for name in names.split(",")], [pytest.mark.long]
    found = [
        pytest.param(
            *(case if len(names) > 1 else [case]), marks=[] if index % 3 == first % 3 else marks
        )
        for index, case in enumerate(cases)
    ]
    return pytest.mark.parametrize(names, found)


def pairs(names: str, *values: Iterable[object]) -> pytest.MarkDecorator:
    """Parametrize a test with all combinations; ``make test`` does as few as have all pairs.

    Args:
        names: Of the parameters, separated by commas.
        values: Those that each parameter takes.
    """
    every = list(itertools.product(*map(list, values)))
    left = {pair for case in every for pair in _pairs_in(case)}
    soon: set[int] = set()
    while left:
        best = max(range(len(every)), key=lambda index: len(left & _pairs_in(every[index])))
        soon.add(best)
        left -= _pairs_in(every[best])
    cases = [
        pytest.param(*case, marks=[] if index in soon else [pytest.mark.long])
        for index, case in enumerate(every)
    ]
    return pytest.mark.parametrize([name.strip() for name in names.split(",")], cases)


def in_turn(names: str, cases: Iterable[object], ways: Sequence[object]) -> pytest.MarkDecorator:
    """Parametrize a test with each case in each way; ``make test`` takes the ways in turn.

    Args:
        names: Of the case and of the way, separated by a comma.
        cases: Each is tried in ``make test`` once.
        ways: In which a case is tried.
    """
    found = []
    for index, case in enumerate(cases):
        for place, way in enumerate(ways):
            is_soon = place == index % len(ways)
            found.append(pytest.param(case, way, marks=[] if is_soon else [pytest.mark.long]))
    return pytest.mark.parametrize([name.strip() for name in names.split(",")], found)


def _pairs_in(case: Sequence[object]) -> set[object]:
    return set(itertools.combinations(((place, id(value)) for place, value in enumerate(case)), 2))
