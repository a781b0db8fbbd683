"""The threads that OpenMP keeps for the next operation of a thread."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path

_SOFT = 1  # omp_pause_soft of OpenMP 5.0: what the program has set stays


def end_team() -> None:
    """End the intra-op threads that wait for this thread's next operation, which starts new ones.

    They wait busily: with GNU's OpenMP for some 20 ms, and so take cores from replicas that begin
    in the meantime. Where OpenMP can't do that, they are left.
    """
    pause = _pause()
    if pause is not None:
        pause(_SOFT)


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
