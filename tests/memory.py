"""How much memory a reader takes of Python, beside how much it reads."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import NamedTuple

# What is taken whatever the size of a file is: the text that is shown, an error's frames.
FIXED_BYTES = 3 << 20


class Growth(NamedTuple):
    """What a reader takes more for larger files."""

    peak: int  # in bytes
    size: int  # by how much they are larger


def peak_of(read: Callable[[], object]) -> int:
    """Return the most bytes of Python's that ``read`` takes at once."""
    tracemalloc.start(1)
    try:
        read()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def growth_of(read: Callable[[], object], make: Callable[[int], int]) -> Growth:
    """Return what ``read`` takes more for what is five times as large.

    Args:
        read: Reads what was made.
        make: Makes what is so many times as large as a small part, and returns its bytes.
    """
    sizes, peaks = [], []
    for times in (20, 20, 100):  # of the first, caches remain
        sizes.append(make(times))
        peaks.append(peak_of(read))
    return Growth(peaks[2] - peaks[1], sizes[2] - sizes[1])
