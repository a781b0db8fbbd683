"""Make many random faults, and print a table of what came of them.

    python -m tests.faults --faults 500 --seed 1 -j 2
    python -m tests.faults --kills 100

Each fault is in a run of its own: one in which its kind, phase, step, rank and the run's ranks,
network and optimizer are drawn from the seed and the fault's number. Exits with 1 if anything was
wrong, and prints the numbers with which to see it again: ``--seed 1 --number 17``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from tests.faults.judge import outcome_of
from tests.faults.kills import KILLS_OF_A_RUN, killed_at_random
from tests.faults.plan import KINDS, PHASES, draw
from tests.interpreters import end_server, forked


def fault_record(seed: int, number: int) -> dict[str, Any]:
    """Make a fault; return what is kept of it."""
    fault, run = draw(f"{seed}-{number}")
    found = outcome_of(fault, run)._asdict()
    return {"number": number, **found, "fault": fault._asdict(), "run": run._asdict()}


def kills_record(seed: int, number: int) -> dict[str, Any]:
    """Make a run with kills; return what is kept of it."""
    found = killed_at_random(f"{seed}-{number}")
    return {"number": number, **found._asdict(), "run": found.run._asdict()}


def table_of_faults(records: Sequence[dict[str, Any]]) -> Iterable[str]:
    """Yield the lines of a table of kinds and phases."""
    yield f"| | {' | '.join(PHASES)} | to the next step | what comes of it |"
    yield "|---" * (len(PHASES) + 3) + "|"
    for name in KINDS:
        ours = [each for each in records if each["fault"]["kind"] == name]
        cells = [_cell([r for r in ours if r["fault"]["phase"] == phase]) for phase in PHASES]
        ends = sorted({each["end"].lower().replace("_", " ") or "?" for each in ours})
        times = _times([each["seconds"] for each in ours if each["seconds"] is not None])
        yield f"| {name} | {' | '.join(cells)} | {times} | {', '.join(ends)} |"


def _cell(records: Sequence[dict[str, Any]]) -> str:
    wrong = sum(bool(each["problems"]) for each in records)
    return "" if not records else f"{len(records)}" + (f", {wrong} wrong" if wrong else "")


def _times(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds):.2f}, {max(seconds):.2f}" if seconds else ""


def table_of_kills(records: Sequence[dict[str, Any]]) -> Iterable[str]:
    """Yield the lines of a table of times."""
    yield "| | kills | with a step before the next | least | 10% | median | 90% | most |"
    yield "|---|---|---|---|---|---|---|---|"
    for name, is_of in (
        ("all", lambda run: True),
        ("plain", lambda run: not run["is_sharded"]),
        ("sharded", lambda run: run["is_sharded"]),
        ("without workers", lambda run: not run["num_workers"]),
        ("with workers", lambda run: run["num_workers"]),
        *((f"{size} ranks", lambda run, size=size: run["size"] == size) for size in (2, 3, 4)),
    ):
        ours = [each for each in records if is_of(each["run"])]
        times = sorted(seconds for each in ours for seconds in each["seconds"])
        if len(times) > 1:
            tenths = statistics.quantiles(times, n=10, method="inclusive")
            shown = times[0], tenths[0], statistics.median(times), tenths[8], times[-1]
            cells = " | ".join(f"{each:.2f}" for each in shown)
            num_kills = sum(each["num_kills"] for each in ours)
            yield f"| {name} | {num_kills} | {len(times)} | {cells} |"


def made(
    make: Callable[[int, int], dict[str, Any]],
    numbers: Sequence[int],
    options: argparse.Namespace,
) -> list[dict[str, Any]]:
    """Make those that aren't in the file of records, and return all of them."""
    path = None if options.records is None else Path(options.records)
    lines = path.read_text().splitlines() if path is not None and path.exists() else []
    records = [each for each in map(json.loads, lines) if each["number"] in {*numbers}]
    known = {each["number"] for each in records}
    began = time.monotonic()

    def one(number: int) -> dict[str, Any] | None:
        is_late = time.monotonic() - began > 60 * options.minutes
        return None if is_late else make(options.seed, number)

    with forked(), ThreadPoolExecutor(options.jobs) as pool:
        waiting = [pool.submit(one, number) for number in numbers if number not in known]
        for done in as_completed(waiting):
            if (record := done.result()) is not None:
                records.append(record)
                _tell(record, options.seed, shows_all=options.number is not None)
                if path is not None:
                    with open(path, "a") as file:
                        file.write(json.dumps(record) + "\n")
    return records


def _tell(record: dict[str, Any], seed: int, *, shows_all: bool) -> None:
    if record["problems"] or shows_all:
        where = {**record.get("fault", {}), **record["run"]}
        print(f"--seed {seed} --number {record['number']}: {record['problems']} {where}")
        print(record["output"], flush=True)


def main(arguments: Sequence[str]) -> int:
    """Make faults, or kills; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--faults", type=int, default=500)
    parser.add_argument("--kills", type=int, help="kill at random so often, and make no faults")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--number", type=int, help="make this one alone, and show its output")
    parser.add_argument("-j", "--jobs", type=int, default=1, help="how many runs at once")
    parser.add_argument("--records", help="a file of outcomes: those that it has aren't made again")
    parser.add_argument("--minutes", type=float, default=1e9, help="after these, begin no more")
    options = parser.parse_args(arguments)
    make, table, count = fault_record, table_of_faults, options.faults
    if options.kills is not None:
        make, table, count = kills_record, table_of_kills, -(-options.kills // KILLS_OF_A_RUN)
    numbers = range(count) if options.number is None else [options.number]
    try:
        records = made(make, numbers, options)
    finally:
        end_server()
    wrong = [each["number"] for each in records if each["problems"]]
    print("\n".join(table(records)))
    print(f"{len(records)} of {len(numbers)} runs, wrong {len(wrong)}: {sorted(wrong)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
