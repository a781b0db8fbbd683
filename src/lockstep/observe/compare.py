"""Two runs side by side: by which rungs their steps differ."""

from __future__ import annotations

from typing import NamedTuple

from lockstep.observe.ladder import Ladder
from lockstep.observe.quantities import duration, in_three_digits, that_add_up
from lockstep.observe.sections import Rate, Section


class Run(NamedTuple):
    """What is compared of a run."""

    name: str
    steps_as: Ladder
    pace: Rate
    samples: int | None  # of a step


def compared(former: Run, latter: Run) -> Section:
    """Return the ladders of two runs beside each other, and what differs most."""
    runs = former, latter
    columns = [_by_rung(run.steps_as) for run in runs]
    names = [*dict.fromkeys([*columns[1], *columns[0]])]
    milliseconds = [[1e3 * column.get(name, 0.0) for name in names] for column in columns]
    changes = [after - before for before, after in zip(*milliseconds, strict=True)]
    texts = [that_add_up(column) for column in milliseconds]
    rows = [
        [name, *cells, _signed(change)]
        for name, *cells, change in zip(names, *texts, changes, strict=True)
    ]
    totals = [1e3 * run.steps_as.seconds for run in runs]
    whole = [in_three_digits(each) for each in totals]
    rows.append(["a step", *whole, _signed(totals[1] - totals[0])])
    title = f"{latter.name} beside {former.name}"
    headings = ("ms a step", former.name, latter.name, "difference")
    return Section(title, _told(former, latter, names, changes), headings, rows)


def _signed(number: float) -> str:
    return "+" * (number > 0) + in_three_digits(number)


def _by_rung(found: Ladder) -> dict[str, float]:
    return {"ideal": found.ideal} | {rung.name: rung.seconds for rung in found.rungs}


def _told(former: Run, latter: Run, names: list[str], changes: list[float]) -> str:
    runs = former, latter
    before, after = (run.steps_as.seconds for run in runs)
    words = (
        f"A step of {latter.name} takes {duration(after)}, {in_three_digits(after / before)} times "
        f"as long as one of {former.name}, which takes {duration(before)}. "
    )
    if former.samples != latter.samples:
        told = ("unknown" if run.samples is None else f"{run.samples:,}" for run in runs)
        words += "Their samples in a step are {} and {}. ".format(*told)
    if former.pace.unit == latter.pace.unit:
        ratio = in_three_digits(latter.pace.mean / former.pace.mean)
        words += f"In {latter.pace.unit} {latter.name} is {ratio} times as fast. "
    largest = max(range(len(names)), key=lambda index: abs(changes[index]))
    if change := changes[largest] / 1e3:
        more = "more" if change > 0 else "less"
        words += f"What differs most is {names[largest]}: {duration(abs(change))} {more}."
    for run in runs:
        if run.steps_as.num_ranks > 1:
            words += f" One rank, for {run.name}: {run.steps_as.basis.removesuffix('.')}."
    return words
