"""``lockstep report``: what a trace shows, in words and numbers."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from lockstep.observe.analysis import PHASES, Share, in_words, shares, summary
from lockstep.observe.trace_files import complete, read_folder


def report(folder: str) -> None:
    """Print what the trace in ``folder`` shows; make its ``trace.json`` if it has none.

    Raises:
        TraceError: If there is no trace, or it has no step that all ranks have finished.
    """
    path = Path(folder)
    ranks = read_folder(path)
    steps = shares(ranks)
    complete(path)
    found = summary(ranks, steps)
    console = Console(highlight=False)
    console.print(f"[bold]{in_words(found)}[/bold]\n")
    low, high = (1e3 * each for each in found.spread)
    console.print(
        f"{found.num_steps:,} steps of {found.num_ranks} ranks; a step takes "
        f"{found.seconds_per_step * 1e3:,.2f} ms (quartiles {low:,.2f} to {high:,.2f}). Each rank "
        f"sends {found.bytes_per_step:,} bytes of gradients in a step, {found.hidden:.1%} of the "
        f"time while it computes.\n"
    )
    table = Table(title="Where the time goes, in ms a step (the first step doesn't count)")
    names = ("rank", *PHASES, "waiting", "transfer", "whole step")
    for name in names:
        table.add_column(name, justify="left" if name == "rank" else "right")
    counted = steps[1:] if len(steps) > 2 else steps
    for rank in range(found.num_ranks):
        own = [together[rank] for together in counted]
        table.add_row(str(ranks[rank].rank), *(f"{value:,.2f}" for value in _means(own)))
    console.print(table)
    console.print(f"The timeline: {path / 'trace.json'}, for https://ui.perfetto.dev")


def _means(own: list[Share]) -> list[float]:
    """In ms, for each column."""
    sums = [sum(share.own[phase] for share in own) for phase in PHASES]
    sums += [sum(s.waiting for s in own), sum(s.transfer for s in own), sum(s.total for s in own)]
    return [value / len(own) / 1e6 for value in sums]
