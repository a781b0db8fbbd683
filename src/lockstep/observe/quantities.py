"""Numbers as people write them: of three digits, with the unit that suits."""

from __future__ import annotations

import itertools
from collections.abc import Sequence


def duration(seconds: float) -> str:
    """Return a length of time, such as "11.7 ms"."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if abs(factor * seconds) >= 0.9995:
            return f"{in_three_digits(factor * seconds)} {unit}"
    return "0 ms" if seconds == 0 else f"{1e6 * seconds:.2g} µs"


def size(num_bytes: float) -> str:
    """Return a number of bytes, such as "1.25 MB"."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= 0.9995 * factor:
            return f"{in_three_digits(num_bytes / factor)} {unit}"
    return f"{num_bytes:.0f} bytes"


def in_three_digits(number: float) -> str:
    """Return a number with as many decimals as make three digits."""
    return f"{number:,.{_decimals(number)}f}"


def _decimals(number: float) -> int:
    return 2 if abs(number) < 9.995 else 1 if abs(number) < 99.95 else 0


def that_add_up(numbers: Sequence[float]) -> list[str]:
    """Return numbers with the decimals of their sum, rounded so that they still add up to it."""
    decimals = _decimals(sum(numbers))
    sums = [round(each, decimals) for each in itertools.accumulate(numbers)]
    return [
        f"{after - before + 0.0:,.{decimals}f}"
        for before, after in itertools.pairwise([0.0, *sums])
    ]
