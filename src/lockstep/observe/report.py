"""``lockstep report``: what a trace shows, in words and numbers, and as a page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lockstep.errors import TraceError
from lockstep.observe.analysis import PHASES, Share, Summary, in_words, shares, summary
from lockstep.observe.page import page
from lockstep.observe.trace_files import complete, read_folder

_COLUMNS = ("rank", *PHASES, "waiting", "transfer", "whole step")


def report(folder: str, text: bool = False) -> None:
    """Print what the trace in ``folder`` shows, and write it to ``report.html`` there.

    Args:
        folder: The folder of the trace; its ``trace.json`` is made if it has none.
        text: Whether to write no page.

    Raises:
        TraceError: If there is no trace, it has no step that all ranks have finished, or the
            page can't be written.
    """
    path = Path(folder)
    ranks = read_folder(path)
    steps = shares(ranks)
    found = summary(ranks, steps)
    counted = steps[1:] if len(steps) > 2 else steps
    rows = [
        [str(ranks[index].rank), *_means([together[index] for together in counted])]
        for index in range(len(ranks))
    ]
    words, facts = in_words(found), _facts(found)
    console = Console(highlight=False)
    console.print(f"[bold]{words}[/bold]\n\n{facts}\n")
    table = Table(title="Where the time goes, in ms a step (the first step doesn't count)")
    for name in _COLUMNS:
        table.add_column(name, justify="left" if name == "rank" else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    try:
        complete(path)
        if not text:
            title = f"lockstep: {path.resolve().name}"
            html = page(title, words, facts, ranks, steps, (_COLUMNS, rows))
            (path / "report.html").write_text(html)
            console.print(f"The same as a page, with a timeline: {path / 'report.html'}")
    except OSError as error:
        raise TraceError(f"{folder} can't be written to: {error.strerror}.") from error
    console.print(f"All spans: {path / 'trace.json'}, for https://ui.perfetto.dev")


def _facts(found: Summary) -> str:
    low, high = (1e3 * each for each in found.spread)
    return (
        f"{found.num_steps:,} steps of {found.num_ranks} ranks; a step takes "
        f"{found.seconds_per_step * 1e3:,.2f} ms (quartiles {low:,.2f} to {high:,.2f}). Each rank "
        f"sends {found.bytes_per_step:,} bytes of gradients in a step; {found.hidden:.1%} of the "
        "time gradients are under way while the rank computes."
    )


def _means(own: Sequence[Share]) -> list[str]:
    """Return the columns of a rank but the first, in ms."""
    sums = [sum(share.own[phase] for share in own) for phase in PHASES]
    sums += [sum(s.waiting for s in own), sum(s.transfer for s in own), sum(s.total for s in own)]
    return [f"{value / len(own) / 1e6:,.2f}" for value in sums]
