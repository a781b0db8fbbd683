"""Where the time of steps goes, by rank.

A step of a rank is from the end of its last optimizer step to the end of the next. In it the ranks
meet: each wait of one rank belongs to one wait of every other. None of them ends before the last
rank has come, so that the time up to there is spent waiting for that rank, and what is left is the
transfer. Evaluations are no part of a step: neither a rank's own, with all that is in it, nor the
time for which it waits while another rank evaluates.
"""

from __future__ import annotations

import heapq
import itertools
import operator
from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Generic, NamedTuple

from lockstep.errors import TraceError
from lockstep.observe.columns import Chosen, Columns, Row, Rows, as_columns, in_order, is_among
from lockstep.observe.records import BucketTimes, RankSpans, Span
from lockstep.observe.replay import REMOVABLE, RankParts, Replay

# What a rank does by itself; "other" is what no span tells.
PHASES = (
    "data",
    "forward",
    "backward",
    "collectives",
    "optimizer",
    "save",
    "other",
)
_PHASES_OF_SPANS = dict.fromkeys(("launch", "average", "rows"), "collectives")
_OF_TRAINING = ("data", "forward")  # unless they are in an evaluation
_SENDS_GRADIENTS = ("backward", "average")
_NEVER = 1 << 63  # later than any time
_MANY = 4096


class StepTimes(NamedTuple):
    """Where the time of one rank goes in one step, in nanoseconds."""

    rank: int
    step: int
    start: int
    stop: int
    evaluation: int  # between these, but no part of the step: this rank's own
    evaluations_of: dict[int, int]  # and what it waited while these others evaluated
    phases: dict[str, int]
    waits_for: dict[int, int]  # by the rank that came last
    transfer: int  # exposed: the program waits for it
    of_gradients: int  # the part of the transfer that is within backwards
    hidden: int  # while the program computes
    between: dict[tuple[str, str], int]  # "other", by the names of the spans before and after it
    saved: dict[str, int]  # by how much it would be shorter without something: see Replay
    # Whether the ranks waited in the same operations. If not, all of the waits count as transfer.
    is_matched: bool

    @property
    def total(self) -> int:
        """The length of the step, without evaluations."""
        return self.stop - self.start - self.evaluation - sum(self.evaluations_of.values())

    @property
    def waiting(self) -> int:
        """The time of waiting for other ranks."""
        return sum(self.waits_for.values())


class _OfRanks(Rows[Sequence[StepTimes]]):
    """Steps: of each, the parts of all ranks, which follow each other."""

    def __init__(self, found: Columns[StepTimes], num_ranks: int) -> None:
        self._shares, self._num_ranks = found, num_ranks

    def __len__(self) -> int:
        return len(self._shares) // self._num_ranks

    def _row(self, index: int) -> Sequence[StepTimes]:
        first = range(len(self))[index] * self._num_ranks
        return [*self._shares[first : first + self._num_ranks]]


def step_times(ranks: Sequence[RankSpans]) -> Sequence[Sequence[StepTimes]]:
    """Return, for each step that all ranks have finished, the part of each rank.

    Raises:
        TraceError: If there is no such step.
    """
    found = Columns(StepTimes)
    numbers = [each.rank for each in ranks]
    by_number, replay = attrgetter("number"), Replay(len(ranks))
    merged = heapq.merge(*map(_finished, ranks), key=by_number)
    for _, same in itertools.groupby(merged, key=by_number):
        steps = [*same]
        if len(steps) == len(ranks):
            waits = [waits_among(step.spans) for step in steps]
            last = _last_to_come(numbers, waits)
            if last or not any(waits):
                came = [*last.of("time")]
                saved = replay.without([_parts(step, came) for step in steps])
            else:
                saved = replay.without_meetings()
            evaluated = dict(zip(numbers, map(_evaluated, steps), strict=True))
            for number, step, less in zip(numbers, steps, saved, strict=True):
                found.append(_times_of(number, step, last, evaluated, less))
    if not found:
        raise TraceError("The trace has no optimizer step that all ranks have finished.")
    return _OfRanks(found, len(ranks))


class ByStep(Generic[Row]):
    """Some rows by their step."""

    def __init__(self, rows: Columns[Row], places: array[int]) -> None:
        self._rows, self._places = rows, places  # these are sorted by their steps
        steps = rows.column("step")
        self._steps = array(steps.typecode, map(steps.__getitem__, places))

    def __iter__(self) -> Iterator[int]:
        return (step for step, _ in itertools.groupby(self._steps))

    def __getitem__(self, step: int) -> Chosen[Row]:
        first, stop = bisect_left(self._steps, step), bisect_right(self._steps, step)
        return Chosen(self._rows, self._places[first:stop])


def spans_by_step(found: RankSpans) -> ByStep[Span]:
    """Return the spans of the program's thread by their step, sorted by their starts."""
    spans = as_columns(Span, found.spans)
    places = spans.places("thread", 0)
    return ByStep(spans, spans.order("step", "start", "-stop", places=places))


def buckets_by_step(found: RankSpans) -> ByStep[BucketTimes]:
    """Return the buckets of each step."""
    buckets = as_columns(BucketTimes, found.buckets)
    return ByStep(buckets, buckets.order("step"))


class _Interval(NamedTuple):
    start: int
    stop: int


class _Step(NamedTuple):
    """A step that a rank has finished."""

    number: int
    start: int
    stop: int
    spans: Chosen[Span]  # of the program's thread, sorted by their starts
    buckets: Sequence[BucketTimes]


def _finished(found: RankSpans) -> Iterator[_Step]:
    """Yield the steps that a rank has finished, in their order."""
    spans, buckets = spans_by_step(found), buckets_by_step(found)
    # With several optimizers, the last step may have ended for some of them alone.
    ended = in_order(end.step for end in found.step_ends)
    former, former_stop = -1, 0
    for number in spans:
        of_thread = spans[number]
        stops = [span.stop for span in of_thread if span.name == "optimizer"]
        if not stops or (ended and not is_among(ended, number)):
            continue
        # Before the first step there is all that begins the program.
        has_former, start = number == former + 1 and former >= 0, former_stop
        if not has_former:
            start = min(span.start for span in of_thread if span.name != "wait")
        former, former_stop = number, stops[-1]
        if start < former_stop:  # unless the trace is damaged
            of_step = spans_within(of_thread, start, former_stop)
            yield _Step(number, start, former_stop, of_step, buckets[number])


def spans_within(spans: Chosen[Span], start: int, stop: int) -> Chosen[Span]:
    """Return those that begin within a step, but for the data and the forwards of evaluations."""

    def are_taken() -> Iterator[bool]:
        until = 0
        for span in spans:
            is_within = start <= span.start < stop
            if is_within and span.name == "evaluation":
                until = max(until, span.stop)
            yield is_within and (span.name not in _OF_TRAINING or span.start >= until)

    return spans.where(are_taken())


def outside_of_evaluations(spans: Iterable[Span]) -> Iterator[Span]:
    """Yield the evaluations, and what isn't in one."""
    until = -_NEVER
    for span in spans:
        if span.name == "evaluation":
            until = max(until, span.stop)
        if span.name == "evaluation" or span.start >= until:
            yield span


class _Evaluated(NamedTuple):
    """The evaluations of one rank in a step, and how long they are before each of its waits."""

    found: Union
    before_waits: list[int]


def _evaluated(step: _Step) -> _Evaluated:
    found = union((s.start, min(s.stop, step.stop)) for s in step.spans if s.name == "evaluation")
    before, last = [], step.start
    for wait in waits_among(step.spans):
        before.append(found.within(last, wait.start) if found.starts else 0)
        last = wait.stop
    return _Evaluated(found, before)


def waits_among(spans: Chosen[Span]) -> Chosen[Span]:
    """Return the waits for other ranks."""
    return spans.where(span.name == "wait" for span in spans)


def _last_to_come(ranks: Sequence[int], waits: Sequence[Sequence[Span]]) -> Columns[_Came]:
    """For each wait of a step: which rank came last, and when; empty if ranks waited otherwise."""
    last = Columns(_Came)
    if len({*map(len, waits)}) == 1:
        for together in zip(*waits, strict=True):
            if len({span.detail for span in together}) > 1:
                return Columns(_Came)
            starts = (_Came(s.start, rank) for rank, s in zip(ranks, together, strict=True))
            last.append(max(starts))
    return last


class _Came(NamedTuple):
    time: int
    rank: int


def _parts(step: _Step, came: Sequence[int]) -> RankParts:
    """Return a rank's own time between its waits, at each of which the last rank came so late."""
    waits = waits_among(step.spans)
    starts = array("q", (wait.start for wait in waits))
    stops = [step.start, *(wait.stop for wait in waits)]
    alone = array("q", map(operator.sub, (*starts, step.stop), stops))
    phases = {phase: array("q", bytes(8 * len(alone))) for phase in REMOVABLE}
    for begin, end, name in intervals(step.start, outside_of_evaluations(step.spans), step.stop):
        phase = _PHASES_OF_SPANS.get(name, name)
        if name != "wait" and phase in phases:
            phases[phase][bisect_right(starts, begin)] += end - begin
    after = array("q", map(operator.sub, stops[1:], came))
    return RankParts(step.start, step.stop, alone, phases, after)


def _times_of(
    rank: int,
    step: _Step,
    last: Sequence[_Came],
    evaluated: dict[int, _Evaluated],
    saved: dict[str, int],
) -> StepTimes:
    phases = dict.fromkeys(PHASES, 0)
    between: Counter[tuple[str, str]] = Counter()
    evaluation = 0
    # Around a step there are others, that end with their optimizer.
    edge = [(0, 0, "optimizer")]
    inner = intervals(step.start, outside_of_evaluations(step.spans), step.stop)
    parts = itertools.chain(edge, inner, edge)
    (_, _, before), (begin, end, name) = next(parts), next(parts)
    for after_begin, after_end, after in parts:
        phase = _PHASES_OF_SPANS.get(name, name)
        if phase in phases:
            phases[phase] += end - begin
        if name == "other":
            between[before, after] += end - begin
        if name == "evaluation":
            evaluation += end - begin
        before, begin, end, name = name, after_begin, after_end, after
    gradients = union((s.start, s.stop) for s in step.spans if s.name in _SENDS_GRADIENTS)
    waits_for, evaluations_of, here = Counter[int](), Counter[int](), evaluated[rank]
    transfer = of_gradients = 0
    waits = waits_among(step.spans)
    for index, span in enumerate(waits):
        if span.start < here.found.until(span.start):
            continue
        waited = 0
        if last:
            came, rank_of_last = last[index]
            came = max(span.start, min(came, span.stop))
            waited = came - span.start
            # Had it evaluated no longer than this rank, it would have come that much earlier.
            longer = evaluated[rank_of_last].before_waits[index] - here.before_waits[index]
            if (awaited := min(waited, longer)) > 0:
                evaluations_of[rank_of_last] += awaited
            waits_for[rank_of_last] += waited - max(0, awaited)
        exposed = span.stop - span.start - waited
        transfer += exposed
        of_gradients += exposed * (span.start < gradients.until(span.start))
    return StepTimes(
        rank=rank,
        step=step.number,
        start=step.start,
        stop=step.stop,
        evaluation=evaluation,
        evaluations_of=evaluations_of,
        phases=phases,
        waits_for=waits_for,
        transfer=transfer,
        of_gradients=of_gradients,
        hidden=_hidden(step.buckets, waits),
        between=between,
        saved=saved,
        is_matched=bool(last) or not waits,
    )


def intervals(start: int, spans: Iterable[Span], stop: int) -> Iterator[tuple[int, int, str]]:
    """Cut the time from ``start`` to ``stop`` up by the innermost span, or "other" where is none.

    The spans are nested, and sorted by their starts.
    """
    names, stops = list[str](), array("q")  # of the spans that are open
    now = start

    def until(time: int) -> Iterator[tuple[int, int, str]]:
        nonlocal now
        if time > now:
            yield now, time, names[-1] if names else "other"
            now = time

    for span in spans:
        while stops and stops[-1] <= span.start:
            yield from until(stops[-1])
            stops.pop(), names.pop()
        yield from until(span.start)
        names.append(span.name)
        stops.append(span.stop)
    while stops:
        yield from until(stops[-1])
        stops.pop(), names.pop()
    yield from until(stop)


def _hidden(buckets: Iterable[BucketTimes], waits: Iterable[Span]) -> int:
    """How long buckets were under way while the program didn't wait."""
    waiting = union((span.start, span.stop) for span in waits)
    under_way = ((bucket.launched, bucket.done) for bucket in buckets)
    both = union(itertools.chain(under_way, zip(waiting.starts, waiting.stops, strict=True)))
    return both.length - waiting.length


class Union(NamedTuple):
    """Intervals that don't touch, sorted."""

    starts: array[int]
    stops: array[int]

    @property
    def length(self) -> int:
        """The length of all of them."""
        return sum(self.stops) - sum(self.starts)

    def until(self, time: int) -> int:
        """Return when the last interval stops that has begun; before any, a time long ago."""
        index = bisect_right(self.starts, time) - 1
        return self.stops[index] if index >= 0 else -_NEVER

    def within(self, start: int, stop: int) -> int:
        """Return the length of what lies between two times."""
        pairs = zip(self.starts, self.stops, strict=True)
        return sum(max(0, min(end, stop) - max(begin, start)) for begin, end in pairs)


def union(intervals: Iterable[tuple[int, int]]) -> Union:
    """Return what is in any of the intervals."""
    found = Columns(_Interval, itertools.starmap(_Interval, intervals))
    joined = Union(array("q"), array("q"))
    # The order of many takes less memory, and that of few is quicker so.
    is_many = len(found) > _MANY
    for start, stop in found.at(found.order("start")) if is_many else sorted(found):
        if joined.stops and start <= joined.stops[-1]:
            joined.stops[-1] = max(stop, joined.stops[-1])
        elif start < stop:  # unless the trace is damaged
            joined.starts.append(start)
            joined.stops.append(stop)
    return joined
