"""``lockstep report``: what a trace shows, in words and numbers, and as a page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from lockstep.errors import TraceError
from lockstep.folders import new_text
from lockstep.observe.analysis import PHASES, StepTimes, step_times
from lockstep.observe.compare import Run, compared
from lockstep.observe.ladder import Ladder, baseline_of, ladder
from lockstep.observe.operators import operators
from lockstep.observe.page import page, rows_of
from lockstep.observe.predict import parse_network, predict
from lockstep.observe.quantities import duration, in_three_digits, size, that_add_up
from lockstep.observe.records import RankSpans
from lockstep.observe.sections import (
    Rate,
    Section,
    global_batch,
    loaders,
    memory,
    rate,
    scaling,
    throughput,
    waiting,
)
from lockstep.observe.summary import Summary, counted_of, summary
from lockstep.observe.trace_files import complete, read_folder
from lockstep.observe.words import in_words
from lockstep.printable import printable
from lockstep.tables import FittedTable

_LADDER = "From the ideal step to the real one"
_WHERE = "Where each rank's time goes"


class _Read(NamedTuple):
    """A trace that was read, and what is told of it in any case."""

    ranks: list[RankSpans]
    steps: Sequence[Sequence[StepTimes]]
    pace: Rate
    samples: int | None
    rungs: Ladder


def _read(path: Path) -> _Read:
    ranks = read_folder(path)
    steps = step_times(ranks)
    counted, samples = counted_of(ranks, steps), global_batch(ranks)
    rungs = ladder(ranks, counted, samples, baseline_of(path))
    return _Read(ranks, steps, rate(ranks, counted), samples, rungs)


def report(
    folder: str, other: str | None = None, text: bool = False, network: str | None = None
) -> None:
    """Print what the trace in ``folder`` shows, and write it to ``report.html`` there.

    Args:
        folder: The folder of the trace; its ``trace.json`` is made if it has none.
        other: The folder of another one: then the report is of that, and compares both.
        text: Whether to write no page.
        network: The network for which steps on more ranks are predicted: ``"LATENCY_US,GBIT"`` or
            a name such as ``"25gbe"``. By default the one that fits the trace best.

    Raises:
        TraceError: If there is no trace, it has no step that all ranks have finished, the page
            can't be written, or the network isn't known.
    """
    path = Path(folder if other is None else other)
    given = None if network is None else parse_network(network)
    ranks, steps, pace, samples, rungs = _read(path)
    beside = None if other is None else _beside(Path(folder), path, Run("", rungs, pace, samples))
    found = summary(ranks, steps)
    counted = counted_of(ranks, steps)
    columns, rows = _where(ranks, counted)
    words, facts = in_words(found, rungs), _facts(found, pace, samples)
    sections = [
        beside,
        throughput(pace),
        waiting(counted),
        loaders(ranks, counted),
        operators(ranks),
        memory(ranks),
        scaling(predict(ranks, counted, given, samples), ranks, samples, rungs.one_rank),
    ]
    shown = [section for section in sections if section is not None]
    unwritten = None
    try:  # before anything is printed: a reader such as `head` may end this by not reading on
        complete(path, ranks)
        if not text:
            title = f"lockstep: {printable(path.resolve().name)}"
            rate_in_words = f"{in_three_digits(pace.mean)} {pace.unit}"
            html = page(title, words, facts, ranks, steps, rungs, rate_in_words, shown)
            with new_text(path / "report.html") as file:
                file.writelines(html)
    except OSError as error:  # a full disk, mostly: what it shows is told all the same
        unwritten = error
    console = Console(highlight=False, markup=False)
    console.print(words, style="bold")
    console.print(f"\n{facts}\n")
    rows_of_ladder = [(row.name, row.ms, row.back) for row in rows_of(rungs)]
    console.print(FittedTable(("", "ms", "gives back"), rows_of_ladder, _LADDER))
    console.print(f"One rank: {rungs.basis}\n" if rungs.num_ranks > 1 else "")
    console.print(FittedTable(columns, rows, f"{_WHERE}, in ms a step (the first doesn't count)"))
    for section in shown:
        if section.rows:
            console.print(FittedTable(section.columns, section.rows, section.title, section.texts))
            console.print(section.note + "\n")
    if unwritten is not None:
        raise TraceError(
            f"{printable(folder)} can't be written to: {unwritten.strerror}."
        ) from unwritten
    if not text:
        console.print(f"The same as a page, with a timeline: {printable(str(path))}/report.html")
    console.print(f"All spans: {printable(str(path))}/trace.json, for https://ui.perfetto.dev")


def _beside(former: Path, latter: Path, run: Run) -> Section:
    """Return how the run in ``latter`` differs from that in ``former``."""
    read, paths = _read(former), [former.resolve(), latter.resolve()]
    names = [printable(path.name) for path in paths]
    if names[0] == names[1]:
        names = [printable(str(path)) for path in paths]
    return compared(Run(names[0], read.rungs, read.pace, read.samples), run._replace(name=names[1]))


def _where(
    ranks: Sequence[RankSpans], steps: Sequence[Sequence[StepTimes]]
) -> tuple[list[str], list[list[str]]]:
    """Return the headings and the rows of the table of ranks, in ms a step."""
    sums = [Counter[str]() for _ in ranks]
    for together in steps:
        for times, total in zip(together, sums, strict=True):
            total.update(times.phases)
            total.update({name: getattr(times, name) for name in ("waiting", "transfer", "total")})
    phases = [phase for phase in PHASES if any(each[phase] for each in sums)]
    names = [*phases, "waiting", "transfer"]
    rows = []
    for found, each in zip(ranks, sums, strict=True):
        spent = [each[name] / len(steps) / 1e6 for name in names]
        rows.append([str(found.rank), *that_add_up(spent), in_three_digits(sum(spent))])
    return ["rank", *names, "whole step"], rows


def _facts(found: Summary, pace: Rate, samples: int | None) -> str:
    low, high = map(duration, found.spread)
    ranks = "1 rank" if found.num_ranks == 1 else f"{found.num_ranks} ranks"
    words = (
        f"{found.num_steps:,} steps of {ranks}. A step takes {duration(found.seconds_per_step)} on "
        f"average (the middle half of them {low} to {high}), which is "
        f"{in_three_digits(pace.mean)} {pace.unit}"
    )
    words += f", with {samples:,} samples in a step. " if pace.unit == "samples/s" else ". "
    if (evaluations := found.evaluations).number:
        words += (
            f"Steps are without evaluations, of which a rank has {evaluations.number:,.3g}, "
            f"{duration(evaluations.seconds)} in all. "
        )
    words += _sent(found)
    if found.num_unmatched:
        words += (
            f" In {found.num_unmatched:,} of the steps the ranks waited in different operations, "
            "so that all of their waits count as transfer."
        )
    return words


def _sent(found: Summary) -> str:
    if not found.collective_bytes:
        return "Nothing is sent in collectives of lockstep's."
    gradients = f"{size(found.gradient_bytes)} of gradients"
    if found.is_hooked:
        return (
            f"Each rank gives {gradients} to its communication hook in a step; what that sends "
            "isn't known."
        )
    return (
        f"Each rank gives {gradients} to collectives in a step, of "
        f"{size(found.collective_bytes)} in all; {found.hidden:.1%} of the time gradients are "
        "under way while the rank computes."
    )
