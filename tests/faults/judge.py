"""Makes a fault happen, and tells what wasn't as it has to be."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from tests.faults.plan import IN_STEP, KINDS, End, Fault, Run
from tests.faults.trial import Seen, StepEnd, Trial, shared_memory, undisturbed

# Within so many seconds a command has to end by itself, timeouts of the ranks included.
BOUND_SECONDS = 30.0
START_AGAIN = 75
_SIGKILL, _SIGTERM = 9, 15


class Outcome(NamedTuple):
    """What came of a fault.

    Attributes:
        fault: The fault.
        run: The run in which it was.
        problems: What was wrong; none if all is as it has to be.
        end: What it came to.
        seconds: From the fault to the end of the next new step on all ranks; None if none followed.
        output: What the commands wrote.
    """

    fault: Fault
    run: Run
    problems: list[str]
    end: str
    seconds: float | None
    output: str


def outcome_of(fault: Fault, run: Run) -> Outcome:
    """Make the fault happen in the run, and judge it."""
    expected = undisturbed(run, BOUND_SECONDS)
    before = shared_memory()
    with Trial(run) as trial:
        seen = trial.command(fault, BOUND_SECONDS)
        problems = ["hang"] if seen.hung else []
        end = _end_of(seen, fault)
        # Workers of the loader that get the signal, too, may end the step before its end.
        may_restart = fault.kind == "SIGTERM to group" and end == End.RESTARTS.name
        if end != fault.end.name and not may_restart:
            problems.append(f"the end is {end or seen.code}, not {fault.end.name}")
        problems += _wrong_words(fault, seen)
        output = seen.output
        if trial.fault_seconds() is None:
            problems.append("the fault didn't happen")
        elif seen.code and not seen.hung:
            again = trial.command(fault, BOUND_SECONDS)  # the same command: the fault happened once
            output += f"\n--- the same command again\n{again.output}"
            if again.code or again.restarts:
                problems.append(f"the second command ended with {again.code}")
        problems += _wrong_results(fault, trial.results(), expected, end)
        if left := trial.left_behind(before):
            problems.append(f"left behind: {left}")
        return Outcome(fault, run, problems, end, _to_next_step(trial), output)


def _end_of(seen: Seen, fault: Fault) -> str:
    """The name of the end; "" if it is none."""
    if seen.code == 0:
        if not seen.restarts:
            return End.GOES_ON.name
        return End.RESTARTS.name if len(seen.restarts) == 1 else ""
    if seen.code == START_AGAIN:
        return End.STOPS.name
    by_launcher = seen.code in (-_SIGKILL, 128 + _SIGTERM)
    return End.IS_ENDED.name if by_launcher else ""


def _wrong_words(fault: Fault, seen: Seen) -> list[str]:
    """What is wrong in what the launcher says."""
    found = []
    kind = KINDS[fault.kind]
    for restart in seen.restarts:
        if restart.rank != fault.rank:
            found.append(f"rank {restart.rank} is blamed ({restart.reason})")
        if not re.search(kind.reason, restart.reason):
            found.append(f"the reason is {restart.reason!r}")
        is_late = fault.kind in ("worker killed", "SIGTERM to group")  # noticed a step later
        if fault.phase in IN_STEP[:3] and restart.step != fault.step and not is_late:
            found.append(f"step {restart.step} is named")
    if fault.kind == "corrupted" and f"isn't as rank {fault.rank} wrote it" not in seen.output:
        found.append("the corrupted snapshot isn't told of")
    return found


def _wrong_results(
    fault: Fault, results: list[dict[str, Any]], expected: list[Any], end: str
) -> list[str]:
    if len(results) < len(expected):
        return ["not all ranks came to the program's end"]
    found = []
    if [result["bits"] for result in results] != expected:
        found.append("other bits than the undisturbed run's")
    if end == End.RESTARTS.name and fault.phase in IN_STEP:
        # Others may have been ended while they took a snapshot; a corrupted one is one more.
        least = fault.step - 1 - (fault.kind == "corrupted")
        if results[0]["first"] < least:
            found.append(f"it went on from step {results[0]['first']}")
    return found


def _to_next_step(trial: Trial) -> float | None:
    """Seconds from the fault to the end of the next new step on all ranks."""
    happened = trial.fault_seconds()
    if happened is None:
        return None
    return to_next_step(trial.steps(), happened, trial.run.size)


def to_next_step(steps: Sequence[StepEnd], happened: float, size: int) -> float | None:
    """Return the seconds from ``happened`` to the end of the next new step on all ranks."""
    done = [-1] * size
    for each in steps:
        if each.seconds <= happened:
            done[each.rank] = max(done[each.rank], each.step)
    new = max(done) + 1
    later = [
        [s.seconds for s in steps if s.rank == rank and s.step >= new and s.seconds > happened]
        for rank in range(size)
    ]
    return max(map(min, later)) - happened if all(later) else None
