"""The report as a page: one file, which needs neither a server nor a network."""

from __future__ import annotations

import base64
import itertools
import json
import math
import statistics
import zlib
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import resources
from typing import Any, NamedTuple

import jinja2
from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup

from lockstep.observe.analysis import StepTimes
from lockstep.observe.columns import Columns
from lockstep.observe.ladder import Ladder
from lockstep.observe.quantities import duration, in_three_digits, size, that_add_up
from lockstep.observe.records import RankSpans
from lockstep.observe.sections import Section
from lockstep.observe.summary import length, profiled

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
_SORTED_KINDS = sorted(_KINDS)
_WITHIN_OTHERS = ("wait", "launch", "rows")
_MOST_COUNTS = 2**31 - 1
_MOST_CURVES = 256  # of logged values, each of which is drawn by itself
_MOST_NAMES = 1 << 17  # characters of the names in a bucket
# A number has the kind of a span and, as a multiple of this, its line.
_LANE = 16


def page(
    title: str,
    words: str,
    facts: str,
    ranks: Sequence[RankSpans],
    steps: Sequence[Sequence[StepTimes]],
    rungs: Ladder,
    pace: str = "",
    sections: Sequence[Section] = (),
) -> Iterator[str]:
    """Yield the page's HTML: paragraphs, the ladder, sections, what its script draws."""
    files = resources.files("lockstep.observe")
    source = files.joinpath("report.html.j2").read_text()
    logged = _logged(ranks)
    data = _drawn(ranks, steps)
    data |= {"logged": logged, "curves": [section.curves for section in sections]}
    data["mean"] = rungs.seconds * 1e6 / data["unit"]
    yield from (
        jinja2.Environment(autoescape=True)
        .from_string(source)
        .generate(
            title=title,
            words=words,
            facts=facts,
            style=Markup(files.joinpath("report.css").read_text()),
            script=Markup(files.joinpath("report.js").read_text()),
            tiles=_tiles(rungs, pace),
            ladder=rungs,
            rungs=rows_of(rungs),
            bars=_bars(rungs),
            has_profiled=bool(profiled(ranks)),
            buckets=_buckets(ranks[0]),
            logged=[*logged],
            has_all=len(logged) < _MOST_CURVES,
            sections=sections,
            data=(htmlsafe_json_dumps(part, dumps=str) for part in _json(data)),
        )
    )


def _tiles(found: Ladder, pace: str) -> Iterator[tuple[str, str, str]]:
    """Yield what is shown in large letters: names, values, and what they are of."""
    if found.num_ranks > 1:
        how = "measured" if found.is_measured else "estimated"
        yield (
            "speed-up",
            f"{in_three_digits(found.speed_up)} \u00d7",
            f"of {found.num_ranks}, {how}",
        )
        yield "one rank's step", duration(found.one_rank), how
    yield "a step", duration(found.seconds), "mean over ranks and steps"
    if pace:
        number, _, unit = pace.partition(" ")
        yield unit, number, "of all ranks together"


class RungRow(NamedTuple):
    """A rung as it is shown; parts of the width are in percent."""

    kind: str
    name: str
    what: str
    ms: str
    back: str
    left: float
    width: float
    is_sum: bool = False


def rows_of(found: Ladder) -> list[RungRow]:
    """Return the rows of the ladder, whose milliseconds add up as they are shown."""
    seconds = [found.ideal, *(rung.seconds for rung in found.rungs)]
    texts = that_add_up([1e3 * each for each in seconds])
    ends = [*itertools.accumulate(seconds)]
    scale = 100 / max(*ends, found.seconds, 1e-9)
    rows = [RungRow("ideal", found.ideal_name, "", texts[0], "", 0, round(scale * ends[0], 2))]
    for rung, text, begin, end in zip(found.rungs, texts[1:], ends, ends[1:], strict=False):
        back = rung.gives_back
        told = "" if back is None else f"{duration(back)}, {back / found.seconds:.0%}"
        places = (round(scale * min(begin, end), 2), round(scale * abs(end - begin), 2))
        rows.append(RungRow(rung.kind, rung.name, rung.what, text, told, *places))
    whole = in_three_digits(1e3 * found.seconds)
    last = RungRow("ideal", "a step", "", whole, "", 0, round(scale * found.seconds, 2), True)
    return [*rows, last]


def _bars(found: Ladder) -> Iterator[tuple[str, str, list[tuple[str, str, str, float]]]]:
    """Yield for each rank its name, its step's length, and the parts of its bar."""
    lengths = {rank: sum(s for _, _, s in parts) for rank, parts in found.by_rank.items()}
    scale = 100 / max(*lengths.values(), 1e-9)
    for rank, parts in found.by_rank.items():
        texts = that_add_up([1e3 * seconds for _, _, seconds in parts])
        shown = [
            (kind, name, text, round(scale * seconds, 2))
            for (kind, name, seconds), text in zip(parts, texts, strict=True)
        ]
        yield f"rank {rank}", duration(lengths[rank]), shown


def _json(value: Any) -> Iterator[str]:
    """Yield JSON in parts. What is long is an iterator, whose elements are made one at a time."""
    if isinstance(value, dict):
        yield "{"
        for number, (name, each) in enumerate(value.items()):
            yield f"{', ' * (number > 0)}{json.dumps(name)}: "
            yield from _json(each)
        yield "}"
    elif isinstance(value, Iterator):
        yield "["
        for number, each in enumerate(value):
            yield ", " * (number > 0)
            yield from _json(each)
        yield "]"
    else:
        yield json.dumps(value)


def _drawn(ranks: Sequence[RankSpans], steps: Sequence[Sequence[StepTimes]]) -> dict[str, Any]:
    """Return times as whole numbers of a unit, from the first of all on."""
    zero = min(span.start for found in ranks for span in found.spans)
    end = max(span.stop for found in ranks for span in found.spans) - zero
    unit = max(100, end // _MOST_COUNTS + 1)  # in nanoseconds
    texts, slow = _Texts(), profiled(ranks)
    return {
        "unit": unit / 1000,
        "end": end // unit + 1,
        "kinds": [*_KINDS.values()],
        "labels": [*_KINDS],
        "ranks": (
            _rank(found, zero, unit, texts)
            | {"steps": _packed((t - zero) // unit for each in steps for t in _ends(each[index]))}
            for index, found in enumerate(ranks)
        ),
        "names": texts.all(),  # after the ranks, that have found them
        "steps": {
            "number": _packed(each[0].step for each in steps),
            "matched": _packed(each[0].is_matched for each in steps),
            "start": _packed((min(s.start for s in each) - zero) // unit for each in steps),
            "stop": _packed((max(s.stop for s in each) - zero) // unit for each in steps),
            "length": _packed(length(each) // unit for each in steps),
            "waiting": _packed(sum(s.waiting for s in each) // len(each) // unit for each in steps),
            "profiled": _packed(each[0].step in slow for each in steps),
        },
    }


def _ends(times: StepTimes) -> tuple[int, int]:
    return times.start, times.stop


class _Texts:
    """What spans are of, each once: operations, loaders, the gradients of a bucket."""

    def __init__(self) -> None:
        self._found = {"": 0}

    def __call__(self, text: str) -> int:
        return self._found.setdefault(text, len(self._found))

    def all(self) -> Iterator[str]:
        """Yield them in the order of their places."""
        yield from self._found


def _rank(found: RankSpans, zero: int, unit: int, texts: _Texts) -> dict[str, Any]:
    entries = Columns(_Entry, _entries(found, texts))
    entries.sort("start", "-stop", "kind", "depth")  # what another one is in comes after it
    lanes = array("h", _lanes(entries))
    kinds = [[*_KINDS].index(kind) for kind in _SORTED_KINDS]
    pairs = zip(entries.of("kind"), lanes, strict=True)
    return {
        "name": f"rank {found.rank}",
        "start": _packed((start - zero) // unit for start in entries.of("start")),
        "length": _packed(_lengths(entries, unit)),
        "kind": _packed(kinds[kind] + _LANE * lane for kind, lane in pairs),
        "text": _packed(entries.of("text")),
        "longest": max(_lengths(entries, unit)),
        "lanes": max(lanes) + 1,
    }


def _lengths(entries: Iterable[_Entry], unit: int) -> Iterator[int]:
    return (max(0, each.stop - each.start) // unit for each in entries)


class _Entry(NamedTuple):
    """Something that is drawn."""

    start: int
    stop: int
    kind: int  # its place among the sorted ones
    depth: int  # those of buckets are from 10 on
    text: int  # the place of what it is of


def _entries(found: RankSpans, texts: _Texts) -> Iterator[_Entry]:
    places = {kind: place for place, kind in enumerate(_SORTED_KINDS)}
    for span in found.spans:
        if span.thread == 0 and span.name in _KINDS:
            within, of = int(span.name in _WITHIN_OTHERS), span.detail
            if span.name == "data" and of.isdecimal():
                of = found.loaders.get(int(of), {}).get("dataset", "")
            yield _Entry(span.start, span.stop, places[span.name], within, texts(of))
    for bucket in found.buckets:
        depth = 10 + bucket.number
        text = texts(_names_in(found.bucket_facts[bucket.number]))
        yield _Entry(bucket.ready, bucket.done, places["bucket"], depth, text)
        yield _Entry(bucket.launched, bucket.done, places["all-reduce"], depth, text)


def _lanes(entries: Iterable[_Entry]) -> Iterator[int]:
    """Yield a line for each entry: one of spans, one of what is in these, and some of buckets."""
    free: list[int] = []  # by line of buckets, until when it is taken
    lines: dict[int, tuple[int, int]] = {}  # by depth, the end of the last bucket and its line
    evaluation, until = _SORTED_KINDS.index("evaluation"), -1
    for start, stop, kind, depth, _ in entries:
        if kind == evaluation:
            until = max(until, stop)
        if depth < 10:
            yield depth if kind == evaluation or start >= until else 1
            continue
        end, line = lines.get(depth, (0, -1))
        if line < 0 or end != stop:  # an all-reduce is drawn upon its bucket
            line = next((i for i, until in enumerate(free) if until <= start), len(free))
            free[line : line + 1] = [stop]
            lines[depth] = stop, line
        yield 2 + line


def _packed(numbers: Iterable[int]) -> str:
    # Of a damaged trace, times of buckets may be far from those of spans.
    within = (max(-_MOST_COUNTS, min(_MOST_COUNTS, number)) for number in numbers)
    return base64.b64encode(zlib.compress(array("i", within))).decode()


def _names_in(facts: Mapping[str, Any]) -> str:
    """The names of a bucket's parameters, as far as a page shows them."""
    names: str = facts.get("parameters", "")
    return names if len(names) <= _MOST_NAMES else f"{names[:_MOST_NAMES]}, and more"


def _buckets(found: RankSpans) -> list[dict[str, str]]:
    times: dict[int, array[float]] = defaultdict(lambda: array("d"))
    for bucket in found.buckets:
        times[bucket.number].append((bucket.done - bucket.ready) / 1e9)
    return [
        {
            "number": str(number),
            "size": size(facts["bytes"]),
            "steps": f"{len(times[number]):,}",
            "took": duration(statistics.median(times[number])),
            "names": _names_in(facts),
        }
        for number, facts in sorted(found.bucket_facts.items())
        if times[number]
    ]


def _logged(ranks: Sequence[RankSpans]) -> dict[str, Iterator[tuple[int, float]]]:
    """By name, what was logged on the first rank that logged it: steps and values."""
    found: dict[str, tuple[array[int], array[float]]] = {}
    for rank in ranks:
        of_rank: dict[str, tuple[array[int], array[float]]] = {}
        for entry in rank.logged:
            for name, value in entry["log"].items():
                is_known = name in of_rank or len(found) + len(of_rank) < _MOST_CURVES
                if math.isfinite(value) and name not in found and is_known:
                    steps, values = of_rank.setdefault(name, (array("q"), array("d")))
                    steps.append(entry["step"])
                    values.append(value)
        found = of_rank | found
    return {name: zip(*both, strict=True) for name, both in found.items()}
