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

from lockstep.observe.faults import give_up
from lockstep.observe.quantities import in_three_digits
from lockstep.observe.records import RankSpans
from lockstep.observe.sections import Section
from lockstep.world import quiet_profiler

_SKIPPED, _NUM_STEPS = 2, 3  # before, and recorded
_MOST, _MOST_SHOWN, _MOST_COLUMNS = 24, 8, 8  # operators of a phase, and ranks
_MOST_NAME = 120
_GIVEN_UP, _LOST = "--trace-operators records no more operators", "The trace has all else."
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
    recording = _Recording(first + _SKIPPED, step, put)
    handle = register_optimizer_step_post_hook(recording.after_step)
    try:
        with _before_each_profiler(recording.give_way):
            yield
    finally:
        handle.remove()
        recording.end()


class _Recording:
    """The recording from the step ``begin``, unless the program has a profiler of its own.

    A process has one profiler: where the program's begins, this one ends.
    """

    def __init__(
        self, begin: int, step: Callable[[], int], put: Callable[[dict[str, Any]], None]
    ) -> None:
        self._begin, self._step, self._put = begin, step, put
        self._running: profile | None = None
        self._is_over = self._is_starting = False

    def after_step(self, *_: object) -> None:
        """Begin or end, if it is time to."""
        if self._step() == self._begin and not self._is_over and self._running is None:
            if profiler._is_profiler_enabled:
                self.give_way()
            else:
                self._start()
        elif self._step() == self._begin + _NUM_STEPS:
            self.end()

    def _start(self) -> None:
        # On CPUs alone, all that it says is that it begins and ends.
        has_devices = torch.accelerator.is_available()
        self._running, self._is_starting = profile(acc_events=True), True
        try:
            with nullcontext() if has_devices else quiet_profiler(os.environ):
                self._running.start()
        except RuntimeError as error:
            self._running, self._is_over = None, True
            give_up(_GIVEN_UP, error, _LOST)
        self._is_starting = False

    def give_way(self) -> None:
        """End, or don't begin, as the program uses a profiler."""
        if not (self._is_over or self._is_starting):
            self.end()
            give_up(_GIVEN_UP, RuntimeError("the program uses torch's profiler itself"), _LOST)

    def end(self) -> None:
        """Tell what was recorded, and record no more."""
        found, self._running = self._running, None
        self._is_over = True
        if found is None:
            return
        try:
            found.stop()
            rows = [*operators_of(found.events() or ())]
        except RuntimeError as error:
            give_up(_GIVEN_UP, error, _LOST)
            return
        if num_steps := min(_NUM_STEPS, self._step() - self._begin):
            self._put({"operators": rows, "first": self._begin, "profiled": num_steps})


@contextmanager
def _before_each_profiler(call: Callable[[], None]) -> Iterator[None]:
    """Call something whenever a profiler of torch's is about to be prepared.

    One that is prepared is as if it ran: with another, neither has what it records.
    """
    of_all: Any = profiler.profile
    prepare = of_all._prepare_trace

    def called_before(self: Any) -> None:
        call()
        prepare(self)

    of_all._prepare_trace = called_before
    try:
        yield
    finally:
        of_all._prepare_trace = prepare


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
