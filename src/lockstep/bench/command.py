"""``lockstep bench collectives``, after its options are parsed."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from lockstep.bench.measuring import measure, report_progress
from lockstep.bench.mpi import measure_with_mpi
from lockstep.bench.plan import Plan, Report, check_operations, format_size, parse_sizes
from lockstep.bench.report import PLAIN_WIDTH, machine_facts, print_report, with_mpi
from lockstep.comm import check_room
from lockstep.errors import BackendUnavailable, BadLaunch, SharedMemoryFull
from lockstep.launcher import check_num_ranks, launch, whole_number

# A rank has a shared tensor, an ordinary one, and what a library allocates for itself.
_BUFFERS_PER_RANK = 3


def collectives(
    ranks: Sequence[str],
    sizes: str,
    rounds: str,
    operations: Sequence[str],
    mpiexec: str,
    json_to: str | None,
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
    counts = tuple(dict.fromkeys(_check_ranks(text) for text in ranks))
    plan = Plan(
        check_operations(operations),
        parse_sizes(sizes, counts),
        whole_number(rounds, "The number of rounds", "15 is enough on a quiet machine."),
    )
    file = _writable(json_to)
    report = Report(plan.rounds, machine=machine_facts())
    for count in counts:
        _measure(report, plan, count, mpiexec)
    text = json.dumps(report.as_data(), indent=1)
    if file is not None:
        file.write_text(text + "\n")
    if json_to == "-":
        print(text)
    else:
        print_report(report, Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH))


def _check_ranks(text: str) -> int:
    count = check_num_ranks(text)
    if count < 2:
        raise BadLaunch(f"--ranks is {count}, but it takes 2 or more to have something to send.")
    return count


def _writable(name: str | None) -> Path | None:
    """The file to write to. It is opened now, to fail before minutes of measuring."""
    if name is None or name == "-":
        return None
    try:
        with open(name, "a"):  # not touch(), which takes a directory
            pass
    except OSError as error:
        raise BadLaunch(f"--json: {name} can't be written: {error.strerror}.") from error
    return Path(name)


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
