"""``lockstep bench collectives`` after its options are parsed, and its tables."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from importlib import metadata
from itertools import groupby
from operator import attrgetter
from pathlib import Path

import torch
from rich.console import Console

from lockstep.bench.measuring import (
    BOUND,
    MPI,
    OPERATIONS,
    UNITS,
    Case,
    MeasuringRanks,
    Quartiles,
    Report,
    SmallCall,
    Workload,
    format_size,
    measure,
    report_progress,
    summarize,
    take_turns,
)
from lockstep.comm import check_room
from lockstep.errors import BadLaunch, SharedMemoryFull
from lockstep.launcher import check_num_ranks, launch, num_cores, whole_number
from lockstep.tables import FittedTable

# A rank has a shared tensor, an ordinary one, and what a library allocates for itself.
_BUFFERS_PER_RANK = 3
# Wide enough for a table in a file; a terminal has its own width.
PLAIN_WIDTH = 220
_COLUMNS = (
    "size, gloo, shm, shm in place, mpi, gloo / shm, gloo / shm in place, mpi / shm in place, "
    "bound, GB/s, shm in place / bound"
)
DEFAULT_SIZES = "1KiB,4KiB,16KiB,64KiB,256KiB,1MiB,4MiB,16MiB,64MiB,256MiB"
_SIZE = re.compile(rf"(\d{{1,15}})\s*({'|'.join(UNITS)})", re.IGNORECASE)
_ELEMENT_BYTES = 4  # of float32

# Many times what the slowest machine needs for the largest sizes.
_TIMEOUT_SECONDS = 1800.0
_GRACE_SECONDS = 5.0

# Open MPI refuses without these to start ranks as root, as in a container, or more ranks than
# there are cores. Other MPIs ignore them.
_ENVIRONMENT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMP_NUM_THREADS": "1",
}
_RANK_PROGRAM = "from lockstep.bench.command import run_rank; run_rank()"


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
        BadLaunch: If an option makes no sense.
        RankFailed: If a rank fails.
    """
    counts = tuple(dict.fromkeys(map(check_num_ranks, ranks or ["2", "4"])))
    if 1 in counts:
        raise BadLaunch("--ranks is 1, but it takes 2 or more to have something to send.")
    plan = Workload(
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


def _measure(report: Report, plan: Workload, count: int, mpiexec: str) -> None:
    """Add to ``report`` what ``count`` ranks measure."""
    reasons = {size: reason_to_skip(size, count) for size in plan.num_bytes}
    skipped = {size: reason for size, reason in reasons.items() if reason}
    plan = replace(plan, num_bytes=tuple(size for size in plan.num_bytes if size not in skipped))
    ours = launch(measure, count, (plan,), num_threads=1, output="plain")[0]
    mpi = Report(plan.rounds)
    if "all_reduce" in plan.operations:
        report_progress(0, f"all_reduce, {count} ranks, MPI")
        mpi = measure_with_mpi(plan, count, mpiexec)
    report.cases += with_mpi(ours.cases, mpi.cases)
    report.skipped += [f"{format_size(s)} on {count} ranks: {why}" for s, why in skipped.items()]
    report.skipped += ours.skipped + mpi.skipped
    report.small_calls += ours.small_calls
    report.mpi = mpi.mpi or report.mpi


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
        exponent = [unit.lower() for unit in UNITS].index(match[2].lower())
        size = int(match[1]) * 1024**exponent
        for count in num_ranks:
            if size == 0 or size % (count * _ELEMENT_BYTES):
                raise BadLaunch(
                    f"--sizes has {word!r}, but {size} bytes aren't equal parts of float32 "
                    f"numbers for {count} ranks. Use a multiple of {count * _ELEMENT_BYTES} B."
                )
        sizes.add(size)
    return tuple(sorted(sizes))


def check_operations(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names, each once; raise BadLaunch if there is no such operation."""
    for name in names:
        if name not in OPERATIONS:
            raise BadLaunch(
                f"--operation is {name!r}, but can be measured: {', '.join(OPERATIONS)}."
            )
    return tuple(dict.fromkeys(names))


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
        "cores": num_cores(),
        "memory": _from_proc("/proc/meminfo", "MemTotal"),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "lockstep": metadata.version("torch-lockstep"),
    }


def _from_proc(path: str, name: str) -> str:
    lines = Path(path).read_text().splitlines() if os.access(path, os.R_OK) else []
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
    by_table = attrgetter("operation", "num_ranks")
    for (operation, num_ranks), cases in groupby(report.cases, by_table):
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


def _table(cases: Sequence[Case], plain: bool) -> FittedTable:
    """A row for each case; columns without figures are left out."""
    rows = [_cells(case) for case in cases]
    shown = [heading for heading in _COLUMNS.split(", ") if any(heading in row for row in rows)]
    cells = [[row.get(heading, "") for heading in shown] for row in rows]
    return FittedTable(shown, cells, texts=(), has_rule=not plain)


def _cells(case: Case) -> dict[str, str]:
    cells = {"size": format_size(case.num_bytes)}
    cells |= {name: format_seconds(summarize(times)) for name, times in case.seconds.items()}
    for heading, (median, low, high) in case.ratios().items():
        cells[heading] = f"{median:.2f} ({low:.2f}-{high:.2f})"
    if bandwidth := case.bandwidth():
        cells["GB/s"] = f"{bandwidth / 1e9:.1f}"
    return cells


def format_seconds(seconds: Quartiles) -> str:
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


def measure_with_mpi(plan: Workload, num_ranks: int, mpiexec: str) -> Report:
    """Measure the all-reduces of ``plan``; if that fails, the report has the reason."""

    def skipped(reason: str) -> Report:
        return Report(plan.rounds, skipped=[f"MPI, {num_ranks} ranks: {reason}"])

    if importlib.util.find_spec("mpi4py") is None:
        return skipped(
            "mpi4py isn't installed. To compare with MPI: pip install 'torch-lockstep[mpi]'"
        )
    if shutil.which(mpiexec) is None:
        return skipped(
            f"there is no command {mpiexec!r}. Install Open MPI or MPICH, or give --mpiexec."
        )
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "answer.json")
        command = [mpiexec, "-n", str(num_ranks), sys.executable, "-c", _RANK_PROGRAM]
        if error := _run([*command, json.dumps(asdict(plan)), str(answer)]):
            return skipped(error)
        if not answer.exists():
            return skipped(f"{mpiexec} ended well, but its ranks said nothing.")
        told = json.loads(answer.read_text())
    cases = [Case(**case) for case in told["cases"]]
    return Report(plan.rounds, cases, mpi=told["implementation"])


def _run(command: Sequence[str]) -> str:
    """Run mpiexec to its end; return the error in words, or ``""``."""
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **_ENVIRONMENT},
        # Ctrl-C reaches this process alone, which then ends mpiexec and waits for it.
        start_new_session=True,
    ) as process:
        try:
            _, errors = process.communicate(timeout=_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            return f"{command[0]} was still not done after {_TIMEOUT_SECONDS:g} s."
        finally:
            if process.poll() is None:
                process.terminate()  # mpiexec then ends its ranks
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_GRACE_SECONDS)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
    if process.returncode == 0:
        return ""
    lines = [line for line in errors.splitlines() if line.strip(" -")]
    reason = next((line for line in lines if "Error" in line), lines[-1] if lines else "no word")
    return f"{command[0]} ended with exit code {process.returncode}: {reason.strip()}"


def run_rank() -> None:
    """Measure on this MPI rank; ``sys.argv`` has the plan, and the file for rank 0's answer."""
    from mpi4py import MPI as mpi  # noqa: N811

    plan, world = json.loads(sys.argv[1]), mpi.COMM_WORLD
    torch.set_num_threads(1)

    def slowest(seconds: list[float]) -> list[float]:
        return [max(values) for values in zip(*world.allgather(seconds), strict=True)]

    ranks = MeasuringRanks(world.Get_rank(), world.Get_size(), world.Barrier, slowest)
    cases = []
    for num_bytes in plan["num_bytes"]:
        tensor = torch.empty(num_bytes // 4)
        call = partial(world.Allreduce, mpi.IN_PLACE, tensor)
        contenders = {MPI: (partial(tensor.fill_, 1.0), call)}
        seconds = take_turns(ranks, contenders, num_bytes, plan["rounds"])
        cases.append(asdict(Case("all_reduce", ranks.size, num_bytes, seconds)))
    if ranks.rank == 0:
        name = mpi.Get_library_version().strip("\0\n ").split(",")[0].splitlines()[0]
        answer = {"cases": cases, "implementation": " ".join(name.split())}
        Path(sys.argv[2]).write_text(json.dumps(answer))
