"""What a trace says: where the time of steps goes, which rank is late, and why.

A step of a rank is from the end of its last optimizer step to the end of the next. In it the ranks
meet: each wait of one rank belongs to one wait of every other. None of them ends before the last
rank has come, so that the time up to there is spent waiting for that rank, and what is left is the
transfer.
"""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from lockstep.errors import TraceError
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
# A rank is late if the others wait for it at least this part of the time, and longer than for any
# other by this factor.
_LATE_PART, _LATE_FACTOR = 0.05, 2.0


class Share(NamedTuple):
    """Where the time of one rank goes in one step, in nanoseconds."""

    rank: int
    step: int
    start: int
    stop: int
    own: dict[str, int]  # by phase
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


def shares(ranks: Sequence[RankSpans]) -> list[list[Share]]:
    """Return, for each step that all ranks have finished, the share of each rank.

    Raises:
        TraceError: If there is no such step.
    """
    by_rank = [*map(by_step, ranks)]
    steps = sorted(set.intersection(*(set(found) for found in by_rank)))
    if not steps:
        raise TraceError("The trace has no optimizer step that all ranks have finished.")
    buckets_by_rank = [*map(buckets_by_step, ranks)]
    found = []
    for step in steps:
        spans = [of_rank[step] for of_rank in by_rank]
        last = _last_to_come([each.rank for each in ranks], [waits_among(own[1]) for own in spans])
        found.append(
            [
                _share(each.rank, step, own, last, _hidden(buckets[step], own[1]))
                for each, buckets, own in zip(ranks, buckets_by_rank, spans, strict=True)
            ]
        )
    return found


def buckets_by_step(found: RankSpans) -> dict[int, list[Bucket]]:
    """Return the buckets of each step; none for a step without."""
    grouped: dict[int, list[Bucket]] = defaultdict(list)
    for bucket in found.buckets:
        grouped[bucket.step].append(bucket)
    return grouped


_Step = tuple[int, list[Span], int]


def by_step(found: RankSpans) -> dict[int, _Step]:
    """For each finished step its start, the sorted spans of the program's thread, and its end."""
    spans = sorted((s for s in found.spans if s.thread == 0), key=lambda s: (s.start, -s.stop))
    grouped: dict[int, list[Span]] = defaultdict(list)
    for span in spans:
        grouped[span.step].append(span)
    # With several optimizers, the last step may have ended for some of them alone.
    ended = {end.step for end in found.step_ends} or {*grouped}
    ends = {s.step: s.stop for s in spans if s.name == "optimizer" and s.step in ended}
    finished: dict[int, _Step] = {}
    for step, end in ends.items():
        # Before the first step there is all that begins the program.
        first = min(span.start for span in grouped[step] if span.name != "wait" or step - 1 in ends)
        start = ends.get(step - 1, first)
        if start >= end:  # as only a damaged trace has it
            continue
        of_step = [s for s in grouped[step] if start <= s.start < end]
        finished[step] = start, [*_without_parts_of_evaluations(of_step)], end
    return finished


def _without_parts_of_evaluations(spans: Sequence[Span]) -> Iterator[Span]:
    """Yield the sorted spans but for the data and the forwards of evaluations."""
    until = 0
    for span in spans:
        if span.name == "evaluation":
            until = max(until, span.stop)
        if span.name not in _OF_TRAINING or span.start >= until:
            yield span


def waits_among(spans: Iterable[Span]) -> list[Span]:
    """Return the waits for other ranks."""
    return [span for span in spans if span.name == "wait"]


def _last_to_come(ranks: Sequence[int], waits: Sequence[Sequence[Span]]) -> list[tuple[int, int]]:
    """For each wait of a step: which rank came last, and when; empty if ranks waited otherwise."""
    operations = {tuple(span.detail for span in own) for own in waits}
    if len(operations) != 1:
        return []
    return [
        max((span.start, rank) for rank, span in zip(ranks, together, strict=True))[::-1]
        for together in zip(*waits, strict=True)
    ]


def _share(rank: int, step: int, own: _Step, last: Sequence[tuple[int, int]], hidden: int) -> Share:
    start, spans, stop = own
    phases = dict.fromkeys(PHASES, 0)
    between: Counter[tuple[str, str]] = Counter()
    parts = pieces(start, spans, stop)
    for index, (begin, end, name) in enumerate(parts):
        phase = _PHASES_OF_SPANS.get(name, name)
        if phase in phases:
            phases[phase] += end - begin
        if name == "other":
            before = parts[index - 1][2] if index else "optimizer"
            after = parts[index + 1][2] if index + 1 < len(parts) else "optimizer"
            between[before, after] += end - begin
    backwards = [(s.start, s.stop) for s in spans if s.name in _SENDS_GRADIENTS]
    waits_for: Counter[int] = Counter()
    transfer = of_gradients = 0
    waits = waits_among(spans)
    for index, span in enumerate(waits):
        waited = 0
        if last:
            rank_of_last, came = last[index]
            waited = max(0, min(came, span.stop) - span.start)
            waits_for[rank_of_last] += waited
        exposed = span.stop - span.start - waited
        transfer += exposed
        of_gradients += exposed * any(s <= span.start < e for s, e in backwards)
    return Share(
        rank=rank,
        step=step,
        start=start,
        stop=stop,
        own=phases,
        waits_for=dict(waits_for),
        transfer=transfer,
        of_gradients=of_gradients,
        hidden=hidden,
        between=dict(between),
        is_matched=bool(last) or not waits,
    )


def pieces(start: int, spans: Iterable[Span], stop: int) -> list[tuple[int, int, str]]:
    """Cut the time from ``start`` to ``stop`` up by the innermost span, or "other" where is none.

    The spans are nested, and sorted by their starts.
    """
    found: list[tuple[int, int, str]] = []
    around: list[Span] = []  # the spans that are open
    now = start

    def go_on(time: int) -> int:
        if time > now:
            found.append((now, time, around[-1].name if around else "other"))
        return max(now, time)

    for span in spans:
        while around and around[-1].stop <= span.start:
            now = go_on(around[-1].stop)
            around.pop()
        now = go_on(span.start)
        around.append(span)
    while around:
        now = go_on(around[-1].stop)
        around.pop()
    go_on(stop)
    return found


def _hidden(buckets: Iterable[Bucket], spans: Sequence[Span]) -> int:
    """How long buckets were under way while the program didn't wait."""
    under_way = _union((bucket.launched, bucket.done) for bucket in buckets)
    waits = _union((span.start, span.stop) for span in waits_among(spans))
    both = sum(
        max(0, min(stop, end) - max(start, begin))
        for start, stop in under_way
        for begin, end in waits
    )
    return sum(stop - start for start, stop in under_way) - both


def _union(intervals: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for start, stop in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        else:
            found.append((start, stop))
    return found


def late_rank(steps: Sequence[Sequence[Share]]) -> Late | None:
    """Return the rank for which the others wait, if there is one, and what it does meanwhile.

    It is the phase that takes it longer than the others, which need not be longer for a rank that
    is late in one phase and early in another.
    """
    num_ranks = len(steps[0])
    waited: Counter[int] = Counter()
    for together in steps:
        for share in together:
            waited.update({rank: ns for rank, ns in share.waits_for.items() if rank != share.rank})
    if num_ranks < 2 or not waited:
        return None
    (rank, most), *others = waited.most_common()
    time_of_others = sum(s.total for together in steps for s in together if s.rank != rank)
    part = most / max(1, time_of_others)
    if part < _LATE_PART or (others and most < _LATE_FACTOR * others[0][1]):
        return None
    excess: Counter[str] = Counter()
    own: Counter[str] = Counter()
    for together in steps:
        (late,) = (share for share in together if share.rank == rank)
        own.update(late.own)
        for phase in PHASES:
            typical = statistics.median(s.own[phase] for s in together if s.rank != rank)
            excess[phase] += round(late.own[phase] - typical)
    (phase, longer) = excess.most_common(1)[0]
    each = 1e9 * len(steps)
    waited_each = most / (num_ranks - 1) / each
    return Late(rank, phase, part, own[phase] / each, longer / each, waited_each)


def length(together: Sequence[Share]) -> int:
    """Return how long a step takes, as the mean over its ranks."""
    return round(statistics.fmean(share.total for share in together))


def gradient_bytes(found: RankSpans) -> Counter[int]:
    """Return by step the bytes of gradients that the rank gave to collectives or to a hook."""
    sizes: Counter[int] = Counter()
    for bucket in found.buckets:
        sizes[bucket.step] += found.bucket_facts[bucket.number]["bytes"]
    rows = sorted((span.start, span.stop) for span in found.spans if span.name == "rows")
    starts = [start for start, _ in rows]
    for wait in waits_among(found.spans) if rows else ():
        index = bisect_right(starts, wait.start) - 1
        if index >= 0 and wait.stop <= rows[index][1]:
            sizes[wait.step] += wait.num_bytes
    return sizes


def collective_bytes(found: RankSpans) -> Counter[int]:
    """Return by step the bytes that the rank gave to collectives of lockstep's."""
    sizes: Counter[int] = Counter()
    for wait in waits_among(found.spans):
        sizes[wait.step] += wait.num_bytes
    return sizes


def summary(ranks: Sequence[RankSpans], steps: Sequence[Sequence[Share]]) -> Summary:
    """Return what the report begins with; the first step, which is like no other, doesn't count."""
    counted = steps[1:] if len(steps) > 2 else steps
    every = [share for together in counted for share in together]
    total = max(1, sum(share.total for share in every))
    lengths = [length(together) / 1e9 for together in counted]
    low, _, high = statistics.quantiles(lengths, n=4) if len(lengths) > 1 else [lengths[0]] * 3
    between: Counter[tuple[str, str]] = Counter()
    for share in every:
        between.update(share.between)
    facts, late = ranks[0].facts, late_rank(counted)
    numbers = {together[0].step for together in counted}
    slow = ranks if late is None else [found for found in ranks if found.rank == late.rank]
    return Summary(
        num_ranks=len(ranks),
        num_steps=len(steps),
        seconds_per_step=statistics.fmean(lengths),
        spread=(low, high),
        phases={phase: sum(share.own[phase] for share in every) / total for phase in PHASES},
        waiting=sum(share.waiting for share in every) / total,
        transfer=sum(share.transfer for share in every) / total,
        of_gradients=sum(share.of_gradients for share in every) / total,
        hidden=sum(share.hidden for share in every) / total,
        gradient_bytes=_mean(map(gradient_bytes, ranks), numbers),
        collective_bytes=_mean(map(collective_bytes, ranks), numbers),
        is_hooked=any(each.get("hooked") for each in ranks[0].bucket_facts.values()),
        is_sharded=any(each.get("deferred") for each in ranks[0].bucket_facts.values()),
        between=between.most_common(1)[0][0] if between else ("optimizer", "optimizer"),
        num_unmatched=sum(not together[0].is_matched for together in counted),
        late=late,
        loader=slowest_loader(slow, numbers),
        num_ranks_of_host=facts.get("local_world_size", len(ranks)),
        num_cores=facts.get("cores") if facts.get("device") == "cpu" else None,
    )


def _mean(by_rank: Iterable[Counter[int]], steps: Collection[int]) -> float:
    """Return the mean over ranks and steps."""
    return statistics.fmean(sizes[step] for sizes in by_rank for step in steps)
