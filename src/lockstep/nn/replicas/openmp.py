"""The threads that OpenMP keeps for the next operation of a thread."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

_SOFT = 1  # omp_pause_soft of OpenMP 5.0: what the program has set stays


@contextmanager
def alone(num_threads: int = 1) -> Iterator[None]:
    """Leave the cores to others: compute with so many intra-op threads, and let none wait.

    Those of the last operation wait for the next one busily, with GNU's OpenMP for some 20 ms, and
    so would take cores from replicas. They are ended; the next operation starts new ones.
    """
    pause, mine = _pause(), torch.get_num_threads()
    if pause is not None:
        pause(_SOFT)
    # For this thread alone, and as what threads to come begin with.
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(mine)


@functools.cache
def _pause() -> Callable[[int], int] | None:
    for name in (None, *_libraries()):
        try:
            library = ctypes.CDLL(name)
            pause: Callable[[int], int] = library.omp_pause_resource_all
        except (OSError, AttributeError):
            continue
        return pause
    return None


def _libraries() -> list[str]:
    """Which of OpenMP's libraries this process has loaded."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return []
    paths = {line.split()[-1] for line in maps.read_text().splitlines() if ".so" in line}
    kinds = ("libgomp", "libomp", "libiomp5")
    return sorted(path for path in paths if Path(path).name.startswith(kinds))
