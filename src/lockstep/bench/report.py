"""The results of ``lockstep bench collectives``, as tables and as data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby

from rich import box
from rich.console import Console
from rich.table import Table

from lockstep.bench.figures import (
    BOUND,
    GLOO,
    IN_PLACE,
    MPI,
    SHM,
    Case,
    SmallCall,
    Summary,
    summarize,
)
from lockstep.bench.plan import format_size

# Wide enough for a table in a file; a terminal has its own width.
PLAIN_WIDTH = 220


@dataclass(frozen=True)
class Report:
    """Everything that was found out.

    Attributes:
        machine: What the figures are of.
        rounds: How many there were.
        cases: What was measured.
        skipped: What was not, and why, a line each.
        small_calls: Where the time of a small call goes, for each number of ranks.
        mpi: The name of the MPI library, or ``""``.
    """

    machine: dict[str, object]
    rounds: int
    cases: list[Case]
    skipped: list[str]
    small_calls: list[SmallCall]
    mpi: str = ""

    def as_data(self) -> dict[str, object]:
        """Everything, for JSON; times are in seconds."""
        return {
            "benchmark": "collectives",
            "dtype": "float32",
            "machine": self.machine,
            "mpi": self.mpi,
            "rounds": self.rounds,
            "cases": [case.as_data() for case in self.cases],
            "small_calls": [asdict(call) for call in self.small_calls],
            "skipped": self.skipped,
        }


def with_mpi(cases: Sequence[Case], mpi: Sequence[Case]) -> list[Case]:
    """Return ``cases``, each with the figures of MPI for the same, where there are some."""
    found = {(case.operation, case.num_ranks, case.num_bytes): case.seconds for case in mpi}
    return [
        Case(
            case.operation,
            case.num_ranks,
            case.num_bytes,
            case.seconds | found.get((case.operation, case.num_ranks, case.num_bytes), {}),
        )
        for case in cases
    ]


def print_report(report: Report, console: Console) -> None:
    """Print all of it: a table for each operation and number of ranks, and what it leaves out."""
    facts = report.machine
    console.print(
        f"{facts['cpu']}, {facts['cores']} cores; torch {facts['torch']}, one thread a rank. "
        f"Median (quartiles) of {report.rounds} rounds.",
        highlight=False,
    )
    for (operation, num_ranks), cases in groupby(
        report.cases, key=lambda case: (case.operation, case.num_ranks)
    ):
        console.print()
        title = f"{operation}, float32, {num_ranks} ranks"
        console.print(title, style="bold")
        console.print(_table(list(cases), plain=not console.is_terminal))
        for call in report.small_calls:
            if (operation, num_ranks) == ("all_reduce", call.num_ranks):
                console.print(*small_call_lines(call), sep="\n", highlight=False)
    if any(BOUND in case.seconds for case in report.cases):
        console.print(
            "\nbound: what the passes over memory must take, on all ranks at once and without a "
            "word between them: each reads its share of the elements from every rank's buffer and "
            "writes the sum to every rank's buffer.",
            highlight=False,
        )
    if report.mpi:
        console.print(
            f"\nmpi: {report.mpi}, in processes of its own, after the others had their turns.",
            highlight=False,
        )
    for line in report.skipped:
        console.print(f"\nleft out: {line}", highlight=False, markup=False)


def _table(cases: Sequence[Case], plain: bool) -> Table:
    table = Table(box=None if plain else box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    table.add_column("size", justify="right", no_wrap=True)
    names = [name for name in (GLOO, SHM, IN_PLACE, MPI) if _has(cases, name)]
    ratios = [(GLOO, SHM), (GLOO, IN_PLACE), (MPI, IN_PLACE), (IN_PLACE, BOUND)]
    ratios = [(a, b) for a, b in ratios if _has(cases, a) and _has(cases, b)]
    bound = [BOUND] if _has(cases, BOUND) else []
    for name in (*names, *(f"{a} / {b}" for a, b in ratios[: len(ratios) - len(bound)])):
        table.add_column(name, justify="right")
    for name in bound:
        for heading in (name, "GB/s", f"{IN_PLACE} / {name}"):
            table.add_column(heading, justify="right")
    for case in cases:
        table.add_row(*_row(case, names, ratios, bound))
    return table


def _has(cases: Iterable[Case], name: str) -> bool:
    return any(name in case.seconds for case in cases)


def _row(
    case: Case, names: Sequence[str], ratios: Sequence[tuple[str, str]], bound: Sequence[str]
) -> list[str]:
    cells = [format_size(case.num_bytes)]
    cells += [_time(case.seconds.get(name)) for name in names]
    shown = [_ratio(case.ratio(slow, fast)) for slow, fast in ratios]
    cells += shown[: len(shown) - len(bound)]
    if bound:
        bandwidth = case.bandwidth()
        cells += [
            _time(case.seconds.get(BOUND)),
            "" if bandwidth is None else f"{bandwidth / 1e9:.1f}",
            shown[-1],
        ]
    return cells


def _time(seconds: Sequence[float] | None) -> str:
    return "" if seconds is None else format_seconds(summarize(seconds))


def _ratio(ratio: Summary | None) -> str:
    return "" if ratio is None else f"{ratio.median:.2f} ({ratio.low:.2f}-{ratio.high:.2f})"


def format_seconds(seconds: Summary) -> str:
    """A median and its quartiles, in one unit that suits the median."""
    unit, factor = ("us", 1e6) if seconds.median < 1e-3 else ("ms", 1e3)
    values = [value * factor for value in seconds]
    digits = 0 if values[0] >= 100 else 1 if values[0] >= 10 else 2
    median, low, high = (f"{value:.{digits}f}" for value in values)
    return f"{median} ({low}-{high}) {unit}"


def small_call_lines(call: SmallCall) -> list[str]:
    """Where the time of a small call goes, a line for each part."""
    whole = summarize(call.whole).median
    lines = [f"\nwhere {whole * 1e6:.1f} us of a call on {format_size(call.num_bytes)} go, in us:"]
    for part in call.parts:
        indent = "      of it: " if part.within else "  "
        lines.append(f"{part.median * 1e6:8.1f}{indent}{part.name}")
    return lines
