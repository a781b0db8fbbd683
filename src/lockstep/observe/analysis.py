"""What a trace says: where the time of steps goes, which rank is late, and why.

A step of a rank is from the end of its last optimizer step to the end of the next. In it the ranks
meet: each wait of one rank belongs to one wait of every other. None of them ends before the last
rank has come, so that the time up to there is spent waiting for that rank, and what is left is the
transfer.
"""

from __future__ import annotations

import heapq
import itertools
import statistics
from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Generic, NamedTuple

from lockstep.errors import TraceError
from lockstep.observe.columns import Chosen, Columns, Row, Rows, as_columns, in_order, is_among
from lockstep.observe.records import Bucket, LoaderUse, RankSpans, Span, slowest_loader

# What a rank does by itself; "other" is what no span tells.
PHASES = (
    "data",
    "forward",
    "backward",
    "collectives",
    "optimizer",
    "evaluation",
    "save",
    "other",
)
_PHASES_OF_SPANS = dict.fromkeys(("launch", "average", "rows"), "collectives")
_OF_TRAINING = ("data", "forward")  # unless they are in an evaluation
_SENDS_GRADIENTS = ("backward", "average")
_NEVER = 1 << 63  # later than any time
_MANY = 4096
# A rank is late if the others wait for it at least this part of the time, and longer than for any
# other by this factor.
_LATE_PART, _LATE_FACTOR = 0.05, 2.0


class StepTimes(NamedTuple):
    """Where the time of one rank goes in one step, in nanoseconds."""

    rank: int
    step: int
    start: int
    stop: int
    phases: dict[str, int]
    waits_for: dict[int, int]  # by the rank that came last
    transfer: int  # exposed: the program waits for it
    of_gradients: int  # the part of the transfer that is within backwards
    hidden: int  # while the program computes
    between: dict[tuple[str, str], int]  # "other", by the names of the spans before and after it
    # Whether the ranks waited in the same operations. If not, all of the waits count as transfer.
    is_matched: bool

    @property
    def total(self) -> int:
        """The length of the step."""
        return self.stop - self.start

    @property
    def waiting(self) -> int:
        """The time of waiting for other ranks."""
        return sum(self.waits_for.values())


class Late(NamedTuple):
    """A rank for which the others wait."""

    rank: int
    phase: str  # that takes it longer than the others
    part: float  # of the time of the others
    seconds: float  # a step, in that phase
    excess: float  # seconds a step, over the median of the others
    waited: float  # seconds a step that the others wait for it, on average


class Summary(NamedTuple):
    """A trace as a whole, in parts of the time of all ranks' steps."""

    num_ranks: int
    num_steps: int
    seconds_per_step: float  # the mean over ranks and steps
    spread: tuple[float, float]  # quartiles
    phases: dict[str, float]
    waiting: float
    transfer: float
    of_gradients: float  # of the transfer
    hidden: float
    gradient_bytes: float  # that a rank gives to collectives, or a hook, in a step
    collective_bytes: float  # all that a rank gives to collectives in a step
    is_hooked: bool  # a communication hook takes the gradients
    is_sharded: bool  # a sharded optimizer does
    between: tuple[str, str]  # the spans around most of "other"
    num_unmatched: int  # steps in which the ranks waited in different operations
    late: Late | None
    loader: LoaderUse | None  # the one that takes most time, on the late rank if there is one
    num_ranks_of_host: int
    num_cores: int | None  # of that host; None if the ranks compute on other devices


class _OfRanks(Rows[Sequence[StepTimes]]):
    """Steps: of each, the shares of all ranks, which follow each other."""

    def __init__(self, found: Columns[StepTimes], num_ranks: int) -> None:
        self._shares, self._num_ranks = found, num_ranks

    def __len__(self) -> int:
        return len(self._shares) // self._num_ranks

    def _row(self, index: int) -> Sequence[StepTimes]:
        first = range(len(self))[index] * self._num_ranks
        return [*self._shares[first : first + self._num_ranks]]


def step_times(ranks: Sequence[RankSpans]) -> Sequence[Sequence[StepTimes]]:
    """Return, for each step that all ranks have finished, the share of each rank.

    Raises:
        TraceError: If there is no such step.
    """
    found = Columns(StepTimes)
    numbers = [each.rank for each in ranks]
    by_number = attrgetter("number")
    merged = heapq.merge(*map(_finished, ranks), key=by_number)
    for _, same in itertools.groupby(merged, key=by_number):
        steps = [*same]
        if len(steps) == len(ranks):
            last = _last_to_come(numbers, [waits_among(step.spans) for step in steps])
            for number, step in zip(numbers, steps, strict=True):
                found.append(_times_of(number, step, last))
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


def buckets_by_step(found: RankSpans) -> ByStep[Bucket]:
    """Return the buckets of each step."""
    buckets = as_columns(Bucket, found.buckets)
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
    buckets: Sequence[Bucket]


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


def _times_of(rank: int, step: _Step, last: Sequence[_Came]) -> StepTimes:
    phases = dict.fromkeys(PHASES, 0)
    between: Counter[tuple[str, str]] = Counter()
    # Around a step there are others, that end with their optimizer.
    edge = [(0, 0, "optimizer")]
    parts = itertools.chain(edge, intervals(step.start, step.spans, step.stop), edge)
    (_, _, before), (begin, end, name) = next(parts), next(parts)
    for after_begin, after_end, after in parts:
        phase = _PHASES_OF_SPANS.get(name, name)
        if phase in phases:
            phases[phase] += end - begin
        if name == "other":
            between[before, after] += end - begin
        before, begin, end, name = name, after_begin, after_end, after
    gradients = _union((s.start, s.stop) for s in step.spans if s.name in _SENDS_GRADIENTS)
    waits_for: Counter[int] = Counter()
    transfer = of_gradients = 0
    waits = waits_among(step.spans)
    for index, span in enumerate(waits):
        waited = 0
        if last:
            came, rank_of_last = last[index]
            waited = max(0, min(came, span.stop) - span.start)
            waits_for[rank_of_last] += waited
        exposed = span.stop - span.start - waited
        transfer += exposed
        of_gradients += exposed * (span.start < gradients.until(span.start))
    return StepTimes(
        rank=rank,
        step=step.number,
        start=step.start,
        stop=step.stop,
        phases=phases,
        waits_for=waits_for,
        transfer=transfer,
        of_gradients=of_gradients,
        hidden=_hidden(step.buckets, waits),
        between=between,
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


def _hidden(buckets: Iterable[Bucket], waits: Iterable[Span]) -> int:
    """How long buckets were under way while the program didn't wait."""
    waiting = _union((span.start, span.stop) for span in waits)
    under_way = ((bucket.launched, bucket.done) for bucket in buckets)
    both = _union(itertools.chain(under_way, zip(waiting.starts, waiting.stops, strict=True)))
    return both.length - waiting.length


class _Union(NamedTuple):
    """Intervals that don't touch, sorted."""

    starts: array[int]
    stops: array[int]

    @property
    def length(self) -> int:
        return sum(self.stops) - sum(self.starts)

    def until(self, time: int) -> int:
        """Return when the last interval stops that has begun; before any, a time long ago."""
        index = bisect_right(self.starts, time) - 1
        return self.stops[index] if index >= 0 else -_NEVER


def _union(intervals: Iterable[tuple[int, int]]) -> _Union:
    found = Columns(_Interval, itertools.starmap(_Interval, intervals))
    union = _Union(array("q"), array("q"))
    # The order of many takes less memory, and that of few is quicker so.
    is_many = len(found) > _MANY
    for start, stop in found.at(found.order("start")) if is_many else sorted(found):
        if union.stops and start <= union.stops[-1]:
            union.stops[-1] = max(stop, union.stops[-1])
        elif start < stop:  # unless the trace is damaged
            union.starts.append(start)
            union.stops.append(stop)
    return union


def late_rank(steps: Sequence[Sequence[StepTimes]]) -> Late | None:
    """Return the rank for which the others wait, if there is one, and what it does meanwhile.

    It is the phase that takes it longer than the others, which need not be longer for a rank that
    is late in one phase and early in another.
    """
    num_ranks = len(steps[0])
    waited: Counter[int] = Counter()
    for together in steps:
        for times in together:
            waited.update({rank: ns for rank, ns in times.waits_for.items() if rank != times.rank})
    if num_ranks < 2 or not waited:
        return None
    (rank, most), *others = waited.most_common()
    time_of_others = sum(s.total for together in steps for s in together if s.rank != rank)
    part = most / max(1, time_of_others)
    if part < _LATE_PART or (others and most < _LATE_FACTOR * others[0][1]):
        return None
    excess: Counter[str] = Counter()
    phases: Counter[str] = Counter()
    for together in steps:
        (late,) = (times for times in together if times.rank == rank)
        phases.update(late.phases)
        for phase in PHASES:
            typical = statistics.median(s.phases[phase] for s in together if s.rank != rank)
            excess[phase] += round(late.phases[phase] - typical)
    (phase, longer) = excess.most_common(1)[0]
    each = 1e9 * len(steps)
    waited_each = most / (num_ranks - 1) / each
    return Late(rank, phase, part, phases[phase] / each, longer / each, waited_each)


def length(together: Sequence[StepTimes]) -> int:
    """Return how long a step takes, as the mean over its ranks."""
    return round(statistics.fmean(times.total for times in together))


def _gradient_bytes(found: RankSpans, steps: Collection[int]) -> int:
    """Return the bytes of gradients that the rank gave to collectives or to a hook in steps."""
    total: int = sum(
        found.bucket_facts[bucket.number]["bytes"]
        for bucket in found.buckets
        if bucket.step in steps
    )
    rows = _union((span.start, span.stop) for span in found.spans if span.name == "rows")
    for wait in found.spans if rows.starts else ():
        if wait.name == "wait" and wait.step in steps and wait.stop <= rows.until(wait.start):
            total += wait.num_bytes
    return total


def _collective_bytes(found: RankSpans, steps: Collection[int]) -> int:
    """Return the bytes that the rank gave to collectives of lockstep's in steps."""
    waits = (span for span in found.spans if span.name == "wait" and span.step in steps)
    return sum(wait.num_bytes for wait in waits)


def counted_of(steps: Sequence[Sequence[StepTimes]]) -> Sequence[Sequence[StepTimes]]:
    """Return the steps without the first one, which is like no other, if there are enough."""
    return steps[1:] if len(steps) > 2 else steps


def summary(ranks: Sequence[RankSpans], steps: Sequence[Sequence[StepTimes]]) -> Summary:
    """Return what the report begins with."""
    counted = counted_of(steps)
    lengths, numbers = array("d"), set[int]()
    sums, phases = Counter[str](), Counter[str]()
    between = Counter[tuple[str, str]]()
    for together in counted:
        lengths.append(length(together) / 1e9)
        numbers.add(together[0].step)
        sums["unmatched"] += not together[0].is_matched
        for times in together:
            phases.update(times.phases)
            between.update(times.between)
            for name in ("total", "waiting", "transfer", "of_gradients", "hidden"):
                sums[name] += getattr(times, name)
    total = max(1, sums["total"])
    low, _, high = statistics.quantiles(lengths, n=4) if len(lengths) > 1 else [lengths[0]] * 3
    facts, late = ranks[0].facts, late_rank(counted)
    slow = ranks if late is None else [found for found in ranks if found.rank == late.rank]
    return Summary(
        num_ranks=len(ranks),
        num_steps=len(steps),
        seconds_per_step=statistics.fmean(lengths),
        spread=(low, high),
        phases={phase: phases[phase] / total for phase in PHASES},
        waiting=sums["waiting"] / total,
        transfer=sums["transfer"] / total,
        of_gradients=sums["of_gradients"] / total,
        hidden=sums["hidden"] / total,
        gradient_bytes=statistics.fmean(_gradient_bytes(r, numbers) for r in ranks) / len(numbers),
        collective_bytes=(
            statistics.fmean(_collective_bytes(r, numbers) for r in ranks) / len(numbers)
        ),
        is_hooked=any(each.get("hooked") for each in ranks[0].bucket_facts.values()),
        is_sharded=any(each.get("deferred") for each in ranks[0].bucket_facts.values()),
        between=between.most_common(1)[0][0] if between else ("optimizer", "optimizer"),
        num_unmatched=sums["unmatched"],
        late=late,
        loader=slowest_loader(slow, numbers),
        num_ranks_of_host=facts.get("local_world_size", len(ranks)),
        num_cores=facts.get("cores") if facts.get("device") == "cpu" else None,
    )
