"""From the seconds of each round to what is reported, as data and as text."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

# What the passes of the algorithm must cost, beside what it takes.
BOUND = "bound"
GLOO, SHM, IN_PLACE, MPI = "gloo", "shm", "shm in place", "mpi"


class Summary(NamedTuple):
    """The middle of some figures: a quarter of them lies below ``low``, and above ``high``."""

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
    """What one size of one operation took on some number of ranks.

    Attributes:
        operation: Its name in ``torch.distributed``.
        num_ranks: How many processes took part.
        num_bytes: The size of the tensor.
        seconds: By contender, in each round, the seconds that a call took.
    """

    operation: str
    num_ranks: int
    num_bytes: int
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def ratio(self, slow: str, fast: str) -> Summary | None:
        """How many times longer ``slow`` took than ``fast``, each round by itself.

        None unless both were measured, in the same rounds.
        """
        if slow not in self.seconds or fast not in self.seconds:
            return None
        pairs = zip(self.seconds[slow], self.seconds[fast], strict=True)
        return summarize([a / b for a, b in pairs])

    def as_data(self) -> dict[str, object]:
        """Everything, for JSON: what was measured, and what follows from it."""
        ratios = {
            f"{slow} / {fast}": ratio._asdict()
            for slow, fast in ((GLOO, SHM), (GLOO, IN_PLACE), (MPI, IN_PLACE), (IN_PLACE, BOUND))
            if (ratio := self.ratio(slow, fast)) is not None
        }
        summaries = {name: summarize(values)._asdict() for name, values in self.seconds.items()}
        return asdict(self) | {
            "summary": summaries,
            "ratios": ratios,
            "bandwidth_bytes_per_second": self.bandwidth(),
        }

    def bandwidth(self) -> float | None:
        """Bytes a second that all ranks together read and wrote while the bound was measured."""
        if BOUND not in self.seconds:
            return None
        # Every rank's share is read from, and written to, as many buffers as there are ranks.
        moved = 2 * self.num_ranks * self.num_bytes
        return moved / summarize(self.seconds[BOUND]).median


@dataclass(frozen=True)
class Part:
    """What one part of a small call takes.

    Attributes:
        name: What it is.
        seconds: How long it takes, in each round.
        within: The name of the part that it is a part of, or ``""``.
    """

    name: str
    seconds: list[float]
    within: str = ""

    @property
    def median(self) -> float:
        """The median of the rounds."""
        return summarize(self.seconds).median


@dataclass(frozen=True)
class SmallCall:
    """Where the time of a call goes that has next to nothing to move.

    Attributes:
        num_ranks: How many processes took part.
        num_bytes: The size of the tensor.
        whole: Seconds a call, in each round.
        parts: What it is made of.
    """

    num_ranks: int
    num_bytes: int
    whole: list[float]
    parts: list[Part]


@dataclass(frozen=True)
class Outcome:
    """What a set of ranks found out.

    Attributes:
        cases: What was measured.
        skipped: Why the rest was not, a line each.
        small_call: Where the time of a small call goes, if that was asked for.
        implementation: The name and version of what carried it out, if that isn't torch.
    """

    cases: list[Case]
    skipped: list[str] = field(default_factory=list)
    small_call: SmallCall | None = None
    implementation: str = ""
