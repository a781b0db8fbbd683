"""``lockstep run --trace-operators``: which operators take the time of forward and backward.

torch.profiler records a few steps of each rank. What an operator takes by itself, without those
that it calls, is added up by the phase in which it began; kernels of a device are a phase of
their own, as they run when the program is elsewhere.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType, profiler
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import profile

from lockstep.observe.quantities import in_three_digits
from lockstep.observe.records import RankSpans
from lockstep.observe.sections import Section
from lockstep.world import quiet_profiler

_SKIPPED, _NUM_STEPS = 2, 3  # before, and recorded
_MOST, _MOST_SHOWN, _MOST_COLUMNS = 24, 8, 8  # operators of a phase, and ranks
_MOST_NAME = 120
_KERNEL = "kernel"
_PHASES = ("forward", "backward", "optimizer", "data", _KERNEL)
# Ranges that contain operators, by the beginnings of their names.
_RANGES = {
    "lockstep: backward": "backward",
    "lockstep: data": "data",
    "Optimizer.step#": "optimizer",
}
_NO_OPERATORS = ("lockstep: ", "Optimizer.", "ProfilerStep", "enumerate(DataLoader)")


class Operator(NamedTuple):
    """What one operator took in all steps that were recorded."""

    phase: str
    name: str
    calls: int
    nanoseconds: int


@contextmanager
def recording_operators(
    first: int, step: Callable[[], int], put: Callable[[dict[str, Any]], None]
) -> Iterator[None]:
    """Record the operators of some steps of this process.

    Args:
        first: The first step of the trace; recording begins some steps later.
        step: Tells the number of the step that the program is in.
        put: Takes the facts that were found.
    """
    begin, running = first + _SKIPPED, list[profile]()

    def after_step(*_: object) -> None:
        if step() == begin and not running and not profiler._is_profiler_enabled:
            # On CPUs alone, all that it says is that it begins and ends.
            has_devices = torch.accelerator.is_available()
            with nullcontext() if has_devices else quiet_profiler(os.environ):
                running.append(profile(acc_events=True))
                running[0].start()
        elif step() == begin + _NUM_STEPS:
            end()

    def end() -> None:
        if not running:
            return
        found = running.pop()
        found.stop()
        if num_steps := min(_NUM_STEPS, step() - begin):
            rows = [*operators_of(found.events() or ())]
            put({"operators": rows, "first": begin, "profiled": num_steps})

    handle = register_optimizer_step_post_hook(after_step)
    try:
        yield
    finally:
        handle.remove()
        end()


def operators_of(events: Iterable[Any]) -> Iterator[Operator]:
    """Yield what takes most of each phase, out of torch.profiler's events."""
    events = [*events]
    ranges = sorted(
        (event.time_range.start, event.time_range.end, phase)
        for event in events
        for name, phase in _RANGES.items()
        if event.name.startswith(name) and event.device_type == DeviceType.CPU
    )
    starts = [start for start, _, _ in ranges]
    sums: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0.0])
    for event in events:
        if event.name.startswith(_NO_OPERATORS):
            continue
        if event.device_type != DeviceType.CPU:
            phase, microseconds = _KERNEL, event.time_range.elapsed_us()
        else:
            index = bisect_right(starts, event.time_range.start) - 1
            is_within = index >= 0 and event.time_range.start < ranges[index][1]
            phase = ranges[index][2] if is_within else "forward"
            microseconds = event.self_cpu_time_total
        of = sums[phase, event.name[:_MOST_NAME]]
        of[0] += 1
        of[1] += microseconds
    for phase in _PHASES:
        rows = [Operator(*key, int(n), round(1e3 * us)) for key, (n, us) in sums.items()]
        rows = [row for row in rows if row.phase == phase]
        yield from sorted(rows, key=lambda row: -row.nanoseconds)[:_MOST]


def operators(ranks: Sequence[RankSpans]) -> Section | None:
    """Return the operators that take most of each phase, by rank, if they were recorded."""
    facts = {found.rank: found.facts for found in ranks if found.facts.get("operators")}
    if not facts:
        return None
    shown = [*facts][:_MOST_COLUMNS]
    cells: dict[tuple[str, str], dict[int, Operator]] = defaultdict(dict)
    for rank in shown:
        for row in map(Operator._make, facts[rank]["operators"]):
            cells[row.phase, row.name][rank] = row
    rows = []
    for phase in _PHASES:
        of_phase = [(name, found) for (p, name), found in cells.items() if p == phase]
        of_phase.sort(key=lambda pair: -sum(row.nanoseconds for row in pair[1].values()))
        for name, found in of_phase[:_MOST_SHOWN]:
            calls = max(row.calls / facts[rank]["profiled"] for rank, row in found.items())
            times = [
                in_three_digits(found[rank].nanoseconds / 1e6 / facts[rank]["profiled"])
                if rank in found
                else "-"
                for rank in shown
            ]
            rows.append([name, phase, f"{calls:,.3g}", *times])
    first = facts[shown[0]]["first"]
    note = (
        "What operators take by themselves, without those that they call, in ms a step: by "
        f"torch.profiler in steps {first} to {first + facts[shown[0]]['profiled'] - 1}, which take "
        "longer for that and are in no mean on this page. Forward is all outside of "
        "backward, optimizer and loader. A dash: not among the longest of that rank."
    )
    columns = ("operator", "in", "calls a step", *(f"rank {rank}, ms" for rank in shown))
    return Section("Operators", note, columns, rows, texts=(0, 1))
