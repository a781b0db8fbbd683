"""What is to be measured, and how it is written on a command line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.errors import BadLaunch

OPERATIONS = ("all_reduce", "broadcast", "all_gather", "reduce_scatter")
DEFAULT_SIZES = "1KiB,4KiB,16KiB,64KiB,256KiB,1MiB,4MiB,16MiB,64MiB,256MiB"

_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_SIZE = re.compile(r"(\d{1,15})\s*(B|KiB|MiB|GiB)", re.IGNORECASE)
_ELEMENT_BYTES = 4  # of float32


@dataclass(frozen=True)
class Plan:
    """What one set of ranks measures.

    Attributes:
        operations: Names from ``OPERATIONS``.
        num_bytes: The sizes of the tensors.
        rounds: How often each contender has its turn.
    """

    operations: tuple[str, ...]
    num_bytes: tuple[int, ...]
    rounds: int


def parse_sizes(text: str, num_ranks: Sequence[int]) -> tuple[int, ...]:
    """Read sizes such as ``"1KiB, 4MiB"``, as numbers of bytes, in ascending order.

    Raises:
        BadLaunch: If one isn't a size, or float32 tensors of it can't be cut into equal parts
            for each number of ranks.
    """
    sizes = set()
    for word in text.split(","):
        match = _SIZE.fullmatch(word.strip())
        if match is None:
            raise BadLaunch(
                f"--sizes has {word.strip()!r}, which is no size. Write sizes as in "
                "--sizes 1KiB,64KiB,16MiB; units are B, KiB, MiB and GiB."
            )
        units = {name.lower(): factor for name, factor in _UNITS.items()}
        size = int(match[1]) * units[match[2].lower()]
        for count in num_ranks:
            if size == 0 or size % (count * _ELEMENT_BYTES):
                raise BadLaunch(
                    f"--sizes has {word.strip()!r}, but {size} bytes aren't equal parts of float32 "
                    f"numbers for {count} ranks. Use a multiple of {count * _ELEMENT_BYTES} B."
                )
        sizes.add(size)
    return tuple(sorted(sizes))


def format_size(num_bytes: int) -> str:
    """``65536`` as ``"64 KiB"``: in the largest unit that leaves a whole number."""
    name, factor = next(
        (name, factor)
        for name, factor in reversed(_UNITS.items())
        if num_bytes % factor == 0 and num_bytes >= factor
    )
    return f"{num_bytes // factor} {name}"


def check_operations(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names, each once; raise BadLaunch if there is no such operation."""
    for name in names:
        if name not in OPERATIONS:
            raise BadLaunch(
                f"--operation is {name!r}, but can be measured: {', '.join(OPERATIONS)}."
            )
    return tuple(dict.fromkeys(names))
