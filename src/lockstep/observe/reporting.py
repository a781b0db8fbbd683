"""``lockstep report``: what a trace shows, in words and numbers, and as a page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from lockstep.errors import TraceError
from lockstep.observe.analysis import PHASES, Share, Summary, in_words, shares, summary
from lockstep.observe.network import parse_network
from lockstep.observe.page import page
from lockstep.observe.predict import predict
from lockstep.observe.sections import Rate, global_batch, memory, rate, scaling, throughput, waiting
from lockstep.observe.trace_files import complete, read_folder

_COLUMNS = ("rank", *PHASES, "waiting", "transfer", "whole step")


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
    steps = shares(ranks)
    found = summary(ranks, steps)
    counted = steps[1:] if len(steps) > 2 else steps
    rows = [
        [str(ranks[index].rank), *_means([together[index] for together in counted])]
        for index in range(len(ranks))
    ]
    pace, samples = rate(ranks, counted), global_batch(ranks)
    words, facts = in_words(found), _facts(found, pace)
    sections = [
        throughput(pace),
        waiting(counted),
        memory(ranks),
        scaling(predict(ranks, counted, given, samples), ranks, samples),
    ]
    shown = [section for section in sections if section is not None]
    console = Console(highlight=False)
    console.print(f"[bold]{words}[/bold]\n\n{facts}\n")
    title = "Where the time goes, in ms a step (the first step doesn't count)"
    console.print(_table(title, _COLUMNS, rows))
    for section in shown:
        if section.rows:
            console.print(_table(section.title, section.columns, section.rows))
            console.print(section.note + "\n")
    try:
        complete(path)
        if not text:
            title = f"lockstep: {path.resolve().name}"
            html = page(title, words, facts, ranks, steps, (_COLUMNS, rows), shown)
            (path / "report.html").write_text(html)
            console.print(f"The same as a page, with a timeline: {path / 'report.html'}")
    except OSError as error:
        raise TraceError(f"{folder} can't be written to: {error.strerror}.") from error
    console.print(f"All spans: {path / 'trace.json'}, for https://ui.perfetto.dev")


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    # 80 columns of a terminal have to do.
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0)
    for name in columns:
        is_first = name == columns[0]
        table.add_column(name, justify="left" if is_first else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _facts(found: Summary, pace: Rate) -> str:
    low, high = (1e3 * each for each in found.spread)
    return (
        f"{found.num_steps:,} steps of {found.num_ranks} ranks; a step takes "
        f"{found.seconds_per_step * 1e3:,.2f} ms (quartiles {low:,.2f} to {high:,.2f}), "
        f"which is {pace.typical:,.1f} {pace.unit}. Each rank "
        f"sends {found.bytes_per_step:,} bytes of gradients in a step; {found.hidden:.1%} of the "
        "time gradients are under way while the rank computes."
    )


def _means(own: Sequence[Share]) -> list[str]:
    """Return the columns of a rank but the first, in ms."""
    sums = [sum(share.own[phase] for share in own) for phase in PHASES]
    sums += [sum(s.waiting for s in own), sum(s.transfer for s in own), sum(s.total for s in own)]
    return [f"{value / len(own) / 1e6:,.2f}" for value in sums]
