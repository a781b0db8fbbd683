"""The report as a page: one file, which needs neither a server nor a network."""

from __future__ import annotations

import base64
import math
import statistics
import zlib
from array import array
from collections import defaultdict
from collections.abc import Iterable, Sequence
from importlib import resources
from typing import Any

import jinja2

from lockstep.observe.analysis import Share
from lockstep.observe.records import RankSpans
from lockstep.observe.sections import Section

# The kinds of spans, their colours in the page's style sheet, and their names in its legend.
_KINDS = {
    "data": "data",
    "forward": "forward",
    "backward": "backward",
    "launch": "collectives",
    "wait": "wait",
    "average": "collectives",
    "rows": "collectives",
    "optimizer": "optimizer",
    "evaluation": "evaluation",
    "save": "save",
    "bucket": "bucket",
    "all-reduce": "reduce",
}
_WITHIN_OTHERS = ("wait", "launch", "rows")
_MOST_COUNTS = 2**31 - 1
# A number has the kind of a span and, as a multiple of this, its line.
_LANE = 16


def page(
    title: str,
    words: str,
    facts: str,
    ranks: Sequence[RankSpans],
    steps: Sequence[Sequence[Share]],
    table: tuple[Sequence[str], Sequence[Sequence[str]]],
    sections: Sequence[Section] = (),
) -> str:
    """Return the page's HTML: paragraphs, the table of ranks, sections, what its script draws."""
    columns, rows = table
    environment = jinja2.Environment(autoescape=True)
    environment.policies["json.dumps_kwargs"] = {}  # keys stay in their order
    source = resources.files("lockstep.observe").joinpath("report.html.j2").read_text()
    logged = _logged(ranks)
    curves = [section.curves for section in sections]
    return environment.from_string(source).render(
        title=title,
        words=words,
        facts=facts,
        columns=columns,
        rows=rows,
        buckets=_buckets(ranks[0]),
        logged=[*logged],
        sections=sections,
        data=_drawn(ranks, steps) | {"logged": logged, "curves": curves},
    )


def _drawn(ranks: Sequence[RankSpans], steps: Sequence[Sequence[Share]]) -> dict[str, Any]:
    """Return times as whole numbers of a unit, from the first of all on."""
    zero = min(span.start for found in ranks for span in found.spans)
    end = max(span.stop for found in ranks for span in found.spans) - zero
    unit = max(100, end // _MOST_COUNTS + 1)  # in nanoseconds
    kinds = [*_KINDS]
    drawn = []
    for found in ranks:
        entries = sorted(_entries(found))
        lanes = _lanes(entries)
        starts = [(start - zero) // unit for start, *_ in entries]
        lengths = [max(0, stop - start) // unit for start, stop, _, _ in entries]
        drawn.append(
            {
                "name": f"rank {found.rank}",
                "start": _packed(starts),
                "length": _packed(lengths),
                "kind": _packed(
                    kinds.index(kind) + _LANE * lane
                    for (_, _, kind, _), lane in zip(entries, lanes, strict=True)
                ),
                "longest": max(lengths),
                "lanes": max(lanes) + 1,
            }
        )
    return {
        "unit": unit / 1000,
        "end": end // unit + 1,
        "kinds": [*_KINDS.values()],
        "labels": kinds,
        "ranks": drawn,
        "steps": {
            "start": _packed((min(s.start for s in each) - zero) // unit for each in steps),
            "length": _packed(max(s.total for s in each) // unit for each in steps),
            "waiting": _packed(sum(s.waiting for s in each) // len(each) // unit for each in steps),
        },
    }


def _entries(found: RankSpans) -> Iterable[tuple[int, int, str, int]]:
    """Yield start, end, kind and depth of what is drawn; buckets have depths from 10 on."""
    for span in found.spans:
        if span.thread == 0 and span.name in _KINDS:
            yield span.start, span.stop, span.name, int(span.name in _WITHIN_OTHERS)
    for bucket in found.buckets:
        yield bucket.ready, bucket.done, "bucket", 10 + bucket.number
        yield bucket.launched, bucket.done, "all-reduce", 10 + bucket.number


def _lanes(entries: Sequence[tuple[int, int, str, int]]) -> list[int]:
    """Return a line for each entry: one for spans, one for waits, and as many as buckets need."""
    free: list[int] = []  # by line of buckets, until when it is taken
    line_of: dict[tuple[int, int], int] = {}
    lanes = []
    for start, stop, _, depth in entries:
        if depth < 10:
            lanes.append(depth)
            continue
        line = line_of.get((depth, stop))  # an all-reduce is drawn upon its bucket
        if line is None:
            line = next((i for i, until in enumerate(free) if until <= start), len(free))
            free[line : line + 1] = [stop]
            line_of[depth, stop] = line
        lanes.append(2 + line)
    return lanes


def _packed(numbers: Iterable[int]) -> str:
    # Of a damaged trace, times of buckets may be far from those of spans.
    within = (max(-_MOST_COUNTS, min(_MOST_COUNTS, number)) for number in numbers)
    return base64.b64encode(zlib.compress(array("i", within).tobytes())).decode()


def _buckets(found: RankSpans) -> list[dict[str, str]]:
    times: dict[int, list[float]] = defaultdict(list)
    for bucket in found.buckets:
        times[bucket.number].append((bucket.done - bucket.ready) / 1e6)
    return [
        {
            "number": str(number),
            "bytes": f"{facts['bytes']:,}",
            "steps": f"{len(times[number]):,}",
            "ms": f"{statistics.median(times[number]):,.2f}",
            "names": ", ".join(facts["parameters"]),
        }
        for number, facts in sorted(found.bucket_facts.items())
        if times[number]
    ]


def _logged(ranks: Sequence[RankSpans]) -> dict[str, list[tuple[int, float]]]:
    """By name, what was logged on the first rank that logged it."""
    found: dict[str, list[tuple[int, float]]] = {}
    for rank in ranks:
        own: dict[str, list[tuple[int, float]]] = defaultdict(list)
        for entry in rank.logged:
            for name, value in entry["log"].items():
                if math.isfinite(value):
                    own[name].append((entry["step"], value))
        found = {**own, **found}
    return found
