"""What is measured, and the times that were measured: data, without torch."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

from lockstep.errors import BadLaunch

OPERATIONS = ("all_reduce", "broadcast", "all_gather", "reduce_scatter")
DEFAULT_SIZES = "1KiB,4KiB,16KiB,64KiB,256KiB,1MiB,4MiB,16MiB,64MiB,256MiB"

# The contenders. BOUND is a lower bound on the time of an all-reduce: its passes over memory.
GLOO, SHM, IN_PLACE, MPI, BOUND = "gloo", "shm", "shm in place", "mpi", "bound"
# Pairs whose times are compared, the slower one first.
RATIOS = ((GLOO, SHM), (GLOO, IN_PLACE), (MPI, IN_PLACE), (IN_PLACE, BOUND))

_UNITS = ("B", "KiB", "MiB", "GiB")
_SIZE = re.compile(r"(\d{1,15})\s*(B|KiB|MiB|GiB)", re.IGNORECASE)
_ELEMENT_BYTES = 4  # of float32


@dataclass(frozen=True)
class Plan:
    """What one set of ranks measures."""

    operations: tuple[str, ...]
    num_bytes: tuple[int, ...]  # the sizes of the tensor
    rounds: int  # the number of turns of each contender


class Summary(NamedTuple):
    """The median and the quartiles of several values."""

    median: float
    low: float
    high: float


def summarize(values: Sequence[float]) -> Summary:
    """Return the median and the quartiles; of a single value, that value."""
    if len(values) == 1:
        return Summary(values[0], values[0], values[0])
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return Summary(statistics.median(values), low, high)


@dataclass(frozen=True)
class Case:
    """The times of one operation, for one tensor size and one number of ranks."""

    operation: str
    num_ranks: int
    num_bytes: int
    seconds: dict[str, list[float]]  # by contender, per call in each round

    def ratio(self, slow: str, fast: str) -> Summary | None:
        """Summarize ``slow / fast`` of each round; None unless both were measured."""
        if slow not in self.seconds or fast not in self.seconds:
            return None
        pairs = zip(self.seconds[slow], self.seconds[fast], strict=True)
        return summarize([a / b for a, b in pairs])

    def bandwidth(self) -> float | None:
        """Bytes per second that all ranks together read and wrote while the bound was measured."""
        if BOUND not in self.seconds:
            return None
        # Each rank reads its share from every rank's buffer, and writes it to every rank's buffer.
        return 2 * self.num_ranks * self.num_bytes / summarize(self.seconds[BOUND]).median

    def as_data(self) -> dict[str, object]:
        """All times, and the figures that follow from them, for JSON."""
        ratios = {f"{slow} / {fast}": self.ratio(slow, fast) for slow, fast in RATIOS}
        return asdict(self) | {
            "summary": {name: summarize(times)._asdict() for name, times in self.seconds.items()},
            "ratios": {name: ratio._asdict() for name, ratio in ratios.items() if ratio},
            "bandwidth_bytes_per_second": self.bandwidth(),
        }


@dataclass(frozen=True)
class Part:
    """One part of a small call: its seconds per call in each round."""

    name: str
    seconds: list[float]
    within: str = ""  # the name of the part around it


@dataclass(frozen=True)
class SmallCall:
    """The seconds per call in each round, of a call that moves few bytes, and of its parts."""

    num_ranks: int
    num_bytes: int
    whole: list[float]
    parts: list[Part]


@dataclass
class Report:
    """Measurements: those of one set of ranks or, with facts of the machine, all of them."""

    rounds: int
    cases: list[Case] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)  # a line with the reason for each
    small_calls: list[SmallCall] = field(default_factory=list)
    mpi: str = ""  # the name and version of the MPI library
    machine: dict[str, object] = field(default_factory=dict)

    def as_data(self) -> dict[str, object]:
        """All results, for JSON; times are in seconds."""
        first = {"benchmark": "collectives", "dtype": "float32", "machine": self.machine}
        return {**first, **asdict(self), "cases": [case.as_data() for case in self.cases]}


def parse_sizes(text: str, num_ranks: Sequence[int]) -> tuple[int, ...]:
    """Read sizes such as ``"1KiB, 4MiB"``, as numbers of bytes, in ascending order.

    Raises:
        BadLaunch: If one isn't a size, or float32 tensors of it can't be cut into equal parts
            for each number of ranks.
    """
    sizes = set()
    for word in map(str.strip, text.split(",")):
        match = _SIZE.fullmatch(word)
        if match is None:
            raise BadLaunch(
                f"--sizes has {word!r}, which is no size. Write sizes as in "
                "--sizes 1KiB,64KiB,16MiB; units are B, KiB, MiB and GiB."
            )
        exponent = [unit.lower() for unit in _UNITS].index(match[2].lower())
        size = int(match[1]) * 1024**exponent
        for count in num_ranks:
            if size == 0 or size % (count * _ELEMENT_BYTES):
                raise BadLaunch(
                    f"--sizes has {word!r}, but {size} bytes aren't equal parts of float32 "
                    f"numbers for {count} ranks. Use a multiple of {count * _ELEMENT_BYTES} B."
                )
        sizes.add(size)
    return tuple(sorted(sizes))


def format_size(num_bytes: int) -> str:
    """``65536`` as ``"64 KiB"``: in the largest unit that leaves a whole number."""
    exponent = max(i for i in range(len(_UNITS)) if num_bytes % 1024**i == 0)
    return f"{num_bytes // 1024**exponent} {_UNITS[exponent]}"


def check_operations(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names, each once; raise BadLaunch if there is no such operation."""
    for name in names:
        if name not in OPERATIONS:
            raise BadLaunch(
                f"--operation is {name!r}, but can be measured: {', '.join(OPERATIONS)}."
            )
    return tuple(dict.fromkeys(names))
