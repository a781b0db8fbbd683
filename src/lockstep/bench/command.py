"""What ``lockstep bench collectives`` does, once its options are read."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from lockstep.bench.figures import Outcome
from lockstep.bench.machine import machine_facts, reason_to_skip
from lockstep.bench.measuring import measure, report_progress
from lockstep.bench.mpi import measure_with_mpi
from lockstep.bench.plan import Plan, check_operations, format_size, parse_sizes
from lockstep.bench.report import PLAIN_WIDTH, Report, print_report, with_mpi
from lockstep.errors import BackendUnavailable, BadLaunch
from lockstep.launcher import check_num_ranks, launch, whole_number


def collectives(
    ranks: Sequence[str],
    sizes: str,
    rounds: str,
    operations: Sequence[str],
    mpiexec: str,
    json_to: str | None,
) -> None:
    """Measure, and print tables or, with ``json_to``, ``"-"`` or a file's name, everything.

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
    report = Report(machine_facts(), plan.rounds, [], [], [])
    for count in counts:
        report = _measured(report, plan, count, mpiexec)
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
    """The file to write to; that it can't be is said before minutes have gone into figures."""
    if name is None or name == "-":
        return None
    try:
        with open(name, "a"):  # not touch(), which takes a directory
            pass
    except OSError as error:
        raise BadLaunch(f"--json: {name} can't be written: {error.strerror}.") from error
    return Path(name)


def _measured(report: Report, plan: Plan, count: int, mpiexec: str) -> Report:
    """Return ``report`` with what ``count`` ranks measure."""
    reasons = {size: reason_to_skip(size, count) for size in plan.num_bytes}
    possible = tuple(size for size, reason in reasons.items() if not reason)
    skipped = [
        f"{format_size(size)} on {count} ranks: {reason}"
        for size, reason in reasons.items()
        if reason
    ]
    plan = Plan(plan.operations, possible, plan.rounds)
    outcome = launch(measure, count, (plan,), num_threads=1, output="plain")[0]
    mpi = Outcome([])
    if "all_reduce" in plan.operations:
        report_progress(0, f"all_reduce, {count} ranks, MPI")
        mpi = measure_with_mpi(plan, count, mpiexec)
    small_call = outcome.small_call
    return Report(
        report.machine,
        report.rounds,
        report.cases + with_mpi(outcome.cases, mpi.cases),
        report.skipped + skipped + outcome.skipped + mpi.skipped,
        report.small_calls + ([small_call] if small_call else []),
        mpi.implementation or report.mpi,
    )
