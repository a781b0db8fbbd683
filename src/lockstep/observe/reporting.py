"""``lockstep report``: what a trace shows, in words and numbers, and as a page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from lockstep.errors import TraceError
from lockstep.folders import new_text
from lockstep.observe.analysis import PHASES, StepTimes, Summary, counted_of, step_times, summary
from lockstep.observe.page import page
from lockstep.observe.predict import parse_network, predict
from lockstep.observe.records import RankSpans
from lockstep.observe.sections import (
    Rate,
    global_batch,
    loaders,
    memory,
    rate,
    scaling,
    throughput,
    waiting,
)
from lockstep.observe.trace_files import complete, read_folder
from lockstep.observe.words import in_words
from lockstep.printable import printable
from lockstep.tables import FittedTable

_WHERE = "Where the time goes"


def report(folder: str, text: bool = False, network: str | None = None) -> None:
    """Print what the trace in ``folder`` shows, and write it to ``report.html`` there.

    Args:
        folder: The folder of the trace; its ``trace.json`` is made if it has none.
        text: Whether to write no page.
        network: The network for which steps on more ranks are predicted: ``"LATENCY_US,GBIT"`` or
            a name such as ``"25gbe"``. By default the one that fits the trace best.

    Raises:
        TraceError: If there is no trace, it has no step that all ranks have finished, the page
            can't be written, or the network isn't known.
    """
    path = Path(folder)
    given = None if network is None else parse_network(network)
    ranks = read_folder(path)
    steps = step_times(ranks)
    found = summary(ranks, steps)
    counted = counted_of(steps)
    columns, rows = _where(ranks, counted)
    pace, samples = rate(ranks, counted), global_batch(ranks)
    words, facts = in_words(found), _facts(found, pace, samples)
    sections = [
        throughput(pace),
        waiting(counted),
        loaders(ranks, counted),
        memory(ranks),
        scaling(predict(ranks, counted, given, samples), ranks, samples),
    ]
    shown = [section for section in sections if section is not None]
    unwritten = None
    try:  # before anything is printed: a reader such as `head` may end this by not reading on
        complete(path, ranks)
        if not text:
            title = f"lockstep: {printable(path.resolve().name)}"
            html = page(title, words, facts, ranks, steps, (columns, rows), shown)
            with new_text(path / "report.html") as file:
                file.writelines(html)
    except OSError as error:  # a full disk, mostly: what it shows is told all the same
        unwritten = error
    console = Console(highlight=False, markup=False)
    console.print(words, style="bold")
    console.print(f"\n{facts}\n")
    console.print(FittedTable(columns, rows, f"{_WHERE}, in ms a step (the first doesn't count)"))
    for section in shown:
        if section.rows:
            console.print(FittedTable(section.columns, section.rows, section.title, section.texts))
            console.print(section.note + "\n")
    if unwritten is not None:
        raise TraceError(f"{folder} can't be written to: {unwritten.strerror}.") from unwritten
    if not text:
        console.print(f"The same as a page, with a timeline: {printable(str(path))}/report.html")
    console.print(f"All spans: {printable(str(path))}/trace.json, for https://ui.perfetto.dev")


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
    names = [*phases, "waiting", "transfer", "total"]
    rows = [
        [str(found.rank), *(f"{each[name] / len(steps) / 1e6:,.2f}" for name in names)]
        for found, each in zip(ranks, sums, strict=True)
    ]
    return ["rank", *phases, "waiting", "transfer", "whole step"], rows


def _facts(found: Summary, pace: Rate, samples: int | None) -> str:
    low, high = (1e3 * each for each in found.spread)
    ranks = "1 rank" if found.num_ranks == 1 else f"{found.num_ranks} ranks"
    words = (
        f"{found.num_steps:,} steps of {ranks}. A step takes "
        f"{found.seconds_per_step * 1e3:,.2f} ms on average (the middle half of them {low:,.2f} to "
        f"{high:,.2f}), which is {pace.mean:,.1f} {pace.unit}"
    )
    words += f", with {samples:,} samples in a step. " if pace.unit == "samples/s" else ". "
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
    gradients = f"{found.gradient_bytes:,.0f} bytes of gradients"
    if found.is_hooked:
        return (
            f"Each rank gives {gradients} to its communication hook in a step; what that sends "
            "isn't known."
        )
    return (
        f"Each rank gives {gradients} to collectives in a step, of "
        f"{found.collective_bytes:,.0f} bytes in all; {found.hidden:.1%} of the time gradients "
        "are under way while the rank computes."
    )
