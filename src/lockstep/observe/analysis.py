"""What a trace says: where the time of steps goes, which rank is late, and why.

A step of a rank is from the end of its last optimizer step to the end of the next. In it the ranks
meet: each wait of one rank belongs to one wait of every other. None of them ends before the last
rank has come, so that the time up to there is spent waiting for that rank, and what is left is the
transfer.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from lockstep.errors import TraceError
from lockstep.observe.trace_files import Bucket, RankSpans, Span

# What a rank does by itself; "other" is what no span tells.
PHASES = ("data", "forward", "backward", "communication", "optimizer", "save", "other")
_SPANS_OF_PHASES = {"launch": "communication"}
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
    hidden: int  # while the program computes

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
    phase: str
    part: float  # of the time of the others


class Summary(NamedTuple):
    """A trace as a whole, in parts of the time of all ranks' steps."""

    num_ranks: int
    num_steps: int
    seconds_per_step: float  # median
    spread: tuple[float, float]  # quartiles
    phases: dict[str, float]
    waiting: float
    transfer: float
    hidden: float
    bytes_per_step: int
    late: Late | None
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
    ends = {span.step: span.stop for span in spans if span.name == "optimizer"}
    finished: dict[int, _Step] = {}
    for step, end in ends.items():
        # Before the first step there is all that begins the program.
        first = min(span.start for span in grouped[step] if span.name != "wait" or step - 1 in ends)
        start = ends.get(step - 1, first)
        finished[step] = start, [s for s in grouped[step] if start <= s.start < end], end
    return finished


def waits_among(spans: Iterable[Span]) -> list[Span]:
    """Return the waits for other ranks."""
    return [span for span in spans if span.name == "wait"]


def _last_to_come(ranks: Sequence[int], waits: Sequence[Sequence[Span]]) -> list[tuple[int, int]]:
    """For each wait of a step: which rank came last, and when; empty if ranks waited otherwise."""
    operations = {tuple(span.detail for span in own) for own in waits}
    if len(operations) != 1 or len(waits) < 2:
        return []
    return [
        max((span.start, rank) for rank, span in zip(ranks, together, strict=True))[::-1]
        for together in zip(*waits, strict=True)
    ]


def _share(rank: int, step: int, own: _Step, last: Sequence[tuple[int, int]], hidden: int) -> Share:
    start, spans, stop = own
    phases = dict.fromkeys(PHASES, 0)
    for begin, end, name in pieces(start, spans, stop):
        phase = _SPANS_OF_PHASES.get(name, name)
        if phase in phases:
            phases[phase] += end - begin
    waits_for: Counter[int] = Counter()
    transfer = 0
    for index, span in enumerate(waits_among(spans)):
        waited = 0
        if last:
            rank_of_last, came = last[index]
            waited = max(0, min(came, span.stop) - span.start)
            waits_for[rank_of_last] += waited
        transfer += span.stop - span.start - waited
    return Share(rank, step, start, stop, phases, dict(waits_for), transfer, hidden)


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
    for together in steps:
        (late,) = (share for share in together if share.rank == rank)
        for phase in PHASES:
            typical = statistics.median(s.own[phase] for s in together if s.rank != rank)
            excess[phase] += round(late.own[phase] - typical)
    return Late(rank, excess.most_common(1)[0][0], part)


def summary(ranks: Sequence[RankSpans], steps: Sequence[Sequence[Share]]) -> Summary:
    """Return what the report begins with; the first step, which is like no other, doesn't count."""
    counted = steps[1:] if len(steps) > 2 else steps
    every = [share for together in counted for share in together]
    total = max(1, sum(share.total for share in every))
    lengths = [max(share.total for share in together) / 1e9 for together in counted]
    low, middle, high = statistics.quantiles(lengths, n=4) if len(lengths) > 1 else [lengths[0]] * 3
    sizes: Counter[int] = Counter()
    for bucket in ranks[0].buckets:
        sizes[bucket.step] += ranks[0].bucket_facts[bucket.number]["bytes"]
    facts = ranks[0].facts
    return Summary(
        num_ranks=len(ranks),
        num_steps=len(steps),
        seconds_per_step=middle,
        spread=(low, high),
        phases={phase: sum(share.own[phase] for share in every) / total for phase in PHASES},
        waiting=sum(share.waiting for share in every) / total,
        transfer=sum(share.transfer for share in every) / total,
        hidden=sum(share.hidden for share in every) / total,
        bytes_per_step=sizes.get(counted[-1][0].step, 0),
        late=late_rank(counted),
        num_ranks_of_host=facts.get("local_world_size", len(ranks)),
        num_cores=facts.get("cores") if facts.get("device") == "cpu" else None,
    )


_ADVICE = {
    "data": "Give the loader workers (num_workers), or do less for each sample.",
    "forward": "Its forward takes longer: it may have larger inputs, a slower device, or work that "
    "the others don't have, such as logging.",
    "backward": "Its backward takes longer: it may have larger inputs or a slower device.",
    "communication": "Its communication hooks, or its start of collectives, take longer.",
    "optimizer": "Its optimizer takes longer; hooks on it, or an average of weights, may.",
    "save": "It saves while the others wait; lockstep.save(async_=True) doesn't hold them up.",
    "other": "It does something outside of loader, forward, backward and optimizer: logging, an "
    "evaluation, or a wait of its own.",
}


def in_words(found: Summary) -> str:
    """Return what holds the run back, and what to do, in a paragraph."""
    seconds = found.seconds_per_step
    taken = f"{seconds * 1e3:,.1f} ms" if seconds < 1 else f"{seconds:,.2f} s"
    speed = f"A step takes {taken}."
    if found.late is not None:
        late = found.late
        return (
            f"{speed} The others wait for rank {late.rank} for {late.part:.0%} of their time, "
            f"which spends it in {_IN[late.phase]}. {_ADVICE[late.phase]}"
        )
    computing = sum(found.phases[phase] for phase in ("forward", "backward", "optimizer"))
    if found.phases["data"] > 0.15:
        return (
            f"{speed} {found.phases['data']:.0%} of the time the ranks wait for data. "
            + _ADVICE["data"]
        )
    if found.waiting > 0.15:
        wait = f"{speed} {found.waiting:.0%} of the time ranks wait for each other"
        if found.num_cores is not None and found.num_cores < found.num_ranks_of_host:
            return (
                f"{wait}: {found.num_ranks_of_host} ranks share {found.num_cores} cores. Take at "
                "most one rank for each core."
            )
        return (
            f"{wait}, now for one and now for another. Their work may differ from step to step, "
            "or other programs take their cores."
        )
    if found.transfer > 0.15:
        return (
            f"{speed} {found.transfer:.0%} of the time goes into sending gradients with nothing "
            "to compute meanwhile. A larger batch on each rank, or several micro-batches in a step "
            "(lockstep.accumulate), sends less often; lockstep.shard_optimizer sends less on one "
            "host; a communication hook in half precision sends half."
        )
    if found.phases["other"] > 0.15:
        return (
            f"{speed} {found.phases['other']:.0%} of the time goes into something outside of "
            "loader, forward, backward and optimizer, such as logging or evaluations."
        )
    return (
        f"{speed} {computing:.0%} of the time is spent computing: nothing that concerns ranks "
        "holds it back."
    )


_IN = {
    "data": "making its data",
    "forward": "the forward",
    "backward": "the backward",
    "communication": "starting its collectives",
    "optimizer": "the optimizer",
    "save": "saving",
    "other": "something else",
}
