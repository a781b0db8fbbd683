"""``lockstep bench collectives`` after its options are parsed, and its tables."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib import metadata
from itertools import groupby
from operator import attrgetter
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from lockstep.bench.measuring import measure, report_progress
from lockstep.bench.mpi import measure_with_mpi
from lockstep.bench.plan import (
    BOUND,
    DEFAULT_SIZES,
    GLOO,
    IN_PLACE,
    MPI,
    RATIOS,
    SHM,
    Case,
    Plan,
    Report,
    SmallCall,
    Summary,
    check_operations,
    format_size,
    parse_sizes,
    summarize,
)
from lockstep.comm import check_room
from lockstep.errors import BackendUnavailable, BadLaunch, SharedMemoryFull
from lockstep.launcher import check_num_ranks, launch, whole_number

# A rank has a shared tensor, an ordinary one, and what a library allocates for itself.
_BUFFERS_PER_RANK = 3
# Wide enough for a table in a file; a terminal has its own width.
PLAIN_WIDTH = 220

# Of a ratio, the slower and the faster contender; of any other column, its heading and "".
_COLUMNS = (
    *(("size", ""), (GLOO, ""), (SHM, ""), (IN_PLACE, ""), (MPI, "")),
    *RATIOS[:-1],
    *((BOUND, ""), ("GB/s", ""), RATIOS[-1]),
)


def collectives(
    ranks: Sequence[str] | None = None,
    sizes: str = DEFAULT_SIZES,
    rounds: str = "15",
    operations: Sequence[str] | None = None,
    mpiexec: str = "mpiexec",
    json_to: str | None = None,
) -> None:
    """Measure, and print tables; with ``json_to``, a file's name or ``"-"``, write JSON.

    Raises:
        BackendUnavailable: If there is no shm here.
        BadLaunch: If an option makes no sense.
        RankFailed: If a rank fails.
    """
    if sys.platform != "linux":
        raise BackendUnavailable(
            f"The process group 'shm' needs Linux, and this is {sys.platform}: there is nothing "
            "to compare."
        )
    counts = tuple(dict.fromkeys(map(check_num_ranks, ranks or ["2", "4"])))
    if 1 in counts:
        raise BadLaunch("--ranks is 1, but it takes 2 or more to have something to send.")
    plan = Plan(
        check_operations(operations or ["all_reduce"]),
        parse_sizes(sizes, counts),
        whole_number(rounds, "The number of rounds", "15 is enough on a quiet machine."),
    )
    if json_to is not None and json_to != "-":
        try:  # now, to fail before minutes of measuring
            with open(json_to, "a"):  # not touch(), which takes a directory
                pass
        except OSError as error:
            raise BadLaunch(f"--json: {json_to} can't be written: {error.strerror}.") from error
    report = Report(plan.rounds, machine=machine_facts())
    for count in counts:
        _measure(report, plan, count, mpiexec)
    text = json.dumps(report.as_data(), indent=1)
    if json_to == "-":
        print(text)
        return
    if json_to is not None:
        Path(json_to).write_text(text + "\n")
    print_report(report, Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH))


def _measure(report: Report, plan: Plan, count: int, mpiexec: str) -> None:
    """Add to ``report`` what ``count`` ranks measure."""
    reasons = {size: reason_to_skip(size, count) for size in plan.num_bytes}
    possible = replace(plan, num_bytes=tuple(size for size in reasons if not reasons[size]))
    ours = launch(measure, count, (possible,), num_threads=1, output="plain")[0]
    mpi = Report(plan.rounds)
    if "all_reduce" in plan.operations:
        report_progress(0, f"all_reduce, {count} ranks, MPI")
        mpi = measure_with_mpi(possible, count, mpiexec)
    report.cases += with_mpi(ours.cases, mpi.cases)
    skipped = [(size, reason) for size, reason in reasons.items() if reason]
    report.skipped += [f"{format_size(size)} on {count} ranks: {why}" for size, why in skipped]
    report.skipped += ours.skipped + mpi.skipped
    report.small_calls += ours.small_calls
    report.mpi = mpi.mpi or report.mpi


def reason_to_skip(num_bytes: int, num_ranks: int) -> str:
    """Why tensors of ``num_bytes`` can't be measured here, or ``""`` if they can."""
    try:
        check_room(num_bytes * num_ranks * _BUFFERS_PER_RANK)
    except SharedMemoryFull as error:
        return str(error)
    return ""


def machine_facts() -> dict[str, object]:
    """Return what times depend on, for JSON."""
    return {
        "cpu": _from_proc("/proc/cpuinfo", "model name") or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": _from_proc("/proc/meminfo", "MemTotal"),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "lockstep": metadata.version("torch-lockstep"),
    }


def _from_proc(path: str, name: str) -> str:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return ""
    values = (line.partition(":")[2] for line in lines if line.startswith(name))
    return next(values, "").strip()


def with_mpi(cases: Sequence[Case], mpi: Sequence[Case]) -> list[Case]:
    """Return ``cases``, each with MPI's times of the same operation, ranks and size."""
    key = attrgetter("operation", "num_ranks", "num_bytes")
    found = {key(case): case.seconds for case in mpi}
    return [replace(case, seconds=case.seconds | found.get(key(case), {})) for case in cases]


def print_report(report: Report, console: Console) -> None:
    """Print a table for each operation and number of ranks, notes, and the skipped cases."""
    say = partial(console.print, highlight=False)
    facts = report.machine
    say(
        f"{facts['cpu']}, {facts['cores']} cores; torch {facts['torch']}, one thread a rank. "
        f"Median (quartiles) of {report.rounds} rounds."
    )
    for (operation, num_ranks), cases in groupby(
        report.cases, attrgetter("operation", "num_ranks")
    ):
        console.print()
        console.print(f"{operation}, float32, {num_ranks} ranks", style="bold")
        console.print(_table(list(cases), plain=not console.is_terminal))
        for call in report.small_calls:
            if (operation, num_ranks) == ("all_reduce", call.num_ranks):
                say(*small_call_lines(call), sep="\n")
    if any(BOUND in case.seconds for case in report.cases):
        say(
            "\nbound: what the passes over memory must take, on all ranks at once and without a "
            "word between them: each reads its share of the elements from every rank's buffer and "
            "writes the sum to every rank's buffer."
        )
    if report.mpi:
        say(f"\nmpi: {report.mpi}, in processes of its own, after the others had their turns.")
    for line in report.skipped:
        say(f"\nleft out: {line}", markup=False)


def _table(cases: Sequence[Case], plain: bool) -> Table:
    """A row for each case; columns without figures are left out."""
    table = Table(box=None if plain else box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    columns = {column: [_cell(case, column) for case in cases] for column in _COLUMNS}
    shown = {column: cells for column, cells in columns.items() if any(cells)}
    for slow, fast in shown:
        heading = f"{slow} / {fast}" if fast else slow
        table.add_column(heading, justify="right", no_wrap=heading == "size")
    for row in zip(*shown.values(), strict=True):
        table.add_row(*row)
    return table


def _cell(case: Case, column: tuple[str, str]) -> str:
    name, fast = column
    if fast:
        ratio = case.ratio(name, fast)
        return f"{ratio.median:.2f} ({ratio.low:.2f}-{ratio.high:.2f})" if ratio else ""
    if name == "size":
        return format_size(case.num_bytes)
    if name == "GB/s":
        bandwidth = case.bandwidth()
        return f"{bandwidth / 1e9:.1f}" if bandwidth else ""
    return format_seconds(summarize(case.seconds[name])) if name in case.seconds else ""


def format_seconds(seconds: Summary) -> str:
    """A median and its quartiles, in one unit that suits the median."""
    unit, factor = ("us", 1e6) if seconds.median < 1e-3 else ("ms", 1e3)
    values = [value * factor for value in seconds]
    digits = 0 if values[0] >= 100 else 1 if values[0] >= 10 else 2
    median, low, high = (f"{value:.{digits}f}" for value in values)
    return f"{median} ({low}-{high}) {unit}"


def small_call_lines(call: SmallCall) -> list[str]:
    """The time of a small call, and a line for each of its parts."""
    whole = summarize(call.whole).median
    lines = [f"\nwhere {whole * 1e6:.1f} us of a call on {format_size(call.num_bytes)} go, in us:"]
    for part in call.parts:
        indent = "      of it: " if part.within else "  "
        lines.append(f"{summarize(part.seconds).median * 1e6:8.1f}{indent}{part.name}")
    return lines
