"""Steps by each rank's own clock, which stands still while the rank waits."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import NamedTuple

from lockstep.observe.analysis import (
    StepTimes,
    buckets_by_step,
    intervals,
    outside_of_evaluations,
    spans_by_step,
    spans_within,
)
from lockstep.observe.columns import Chosen
from lockstep.observe.records import BucketTimes, RankSpans, Span

# More would change the result little. What is computed of a span takes more than it in a file.
_MAX_STEPS, _MAX_SPANS = 64, 1 << 14
# What a rank does less of with a smaller part of the global batch.
_SHRINKING = ("data", "forward", "backward")


class Kind(Enum):
    """What an event is to the network."""

    LAUNCH = "a bucket is launched"
    BUCKET = "the sums of the first bucket are needed whose sums weren't needed yet"
    OTHER = "another collective, whose result is needed at once"


class Event(NamedTuple):
    """Something at a time of the rank's own clock, which is the sum of both numbers of seconds."""

    shrinking: float  # spent on what shrinks with the rank's part of the batch
    fixed: float
    kind: Kind
    num_bytes: int


class Timeline(NamedTuple):
    """A step of one rank by its own clock: its events, and its length as their times."""

    events: list[Event]
    shrinking: float
    fixed: float

    def computing(self, factor: float = 1.0) -> float:
        """Return the seconds of computing, if the rank's part of the batch is scaled by this."""
        return factor * self.shrinking + self.fixed

    def segments(self) -> list[float]:
        """Return the seconds of computing between two meetings of the ranks.

        Waits for several buckets, one after the other, are one meeting. What follows the last one
        belongs to the first segment, as the next step goes on from there.
        """
        meetings = []
        last = None
        for event in self.events:
            if event.kind is Kind.OTHER or (event.kind is Kind.BUCKET and last is not Kind.BUCKET):
                meetings.append(event.shrinking + event.fixed)
            last = event.kind
        if not meetings:
            return [self.computing()]
        between = [after - before for before, after in itertools.pairwise(meetings)]
        return [meetings[0] + self.computing() - meetings[-1], *between]


class RankStep(NamedTuple):
    """What the program's thread of one rank does in one step."""

    times: StepTimes
    spans: Sequence[Span]  # sorted by their starts; of what is in evaluations, nothing
    buckets: list[tuple[int, Span]]  # when each was launched, and the wait for it, in their order
    others: list[Span]  # other waits

    def timeline(self) -> Timeline:
        """Return the step by the rank's own clock."""
        spans = [*intervals(self.times.start, self.spans, self.times.stop)]
        starts = [start for start, _, _ in spans]
        sums = [(0, 0)]
        for start, stop, name in spans:
            sums.append(_later(sums[-1], name, stop - start))

        def at(time: int) -> tuple[float, float]:
            index = max(0, bisect_right(starts, time) - 1)
            shrinking, fixed = _later(sums[index], spans[index][2], time - starts[index])
            return shrinking / 1e9, fixed / 1e9

        marks = [(launched, Kind.LAUNCH, wait.num_bytes) for launched, wait in self.buckets]
        marks += [(wait.start, Kind.BUCKET, wait.num_bytes) for _, wait in self.buckets]
        marks += [(wait.start, Kind.OTHER, wait.num_bytes) for wait in self.others]
        marks.sort(key=lambda mark: mark[0])
        events = [Event(*at(time), kind, num_bytes) for time, kind, num_bytes in marks]
        return Timeline(events, *at(self.times.stop))


def _later(clock: tuple[int, int], name: str, length: int) -> tuple[int, int]:
    """Return the clock after ``length`` ns of a span with this name."""
    shrinking, fixed = clock
    if name in ("wait", "evaluation"):
        return clock
    return (shrinking + length, fixed) if name in _SHRINKING else (shrinking, fixed + length)


def rank_steps(
    ranks: Sequence[RankSpans], steps: Sequence[Sequence[StepTimes]]
) -> list[list[RankStep]]:
    """Return, by step, what each rank does in it, for some of ``steps``, evenly chosen.

    These have at most so many spans: there may be none of steps with far more than any program has.
    """
    of_step = sum(len(found.spans) for found in ranks) // len(steps)
    chosen = steps[:: -(-len(steps) // max(1, min(_MAX_STEPS, _MAX_SPANS // max(1, of_step))))]
    spans, buckets = [*map(spans_by_step, ranks)], [*map(buckets_by_step, ranks)]
    found, left = list[list[RankStep]](), _MAX_SPANS
    for together in chosen:
        number = together[0].step
        size = sum(len(of[number]) for of in spans) + sum(len(sent[number]) for sent in buckets)
        if size <= left:
            left -= size
            each_rank = zip(together, spans, buckets, strict=True)
            found.append([_rank_step(s, of[number], sent[number]) for s, of, sent in each_rank])
    return found


def _rank_step(times: StepTimes, of_step: Chosen[Span], buckets: Iterable[BucketTimes]) -> RankStep:
    spans = [*outside_of_evaluations(spans_within(of_step, times.start, times.stop))]
    waits = [span for span in spans if span.name == "wait"]
    stops = [wait.stop for wait in waits]
    launches: dict[int, int] = {}  # by the index of the wait for a bucket
    for bucket in sorted(buckets, key=lambda bucket: (bucket.done, bucket.launched)):
        index = bisect_right(stops, bucket.done) - 1
        if index >= 0 and waits[index].start >= bucket.launched:
            launches[index] = bucket.launched
    return RankStep(
        times,
        spans,
        [(launched, waits[index]) for index, launched in sorted(launches.items())],
        [wait for index, wait in enumerate(waits) if index not in launches],
    )


class Collective(NamedTuple):
    """A collective of all ranks, by one clock, in seconds."""

    num_bytes: int
    launched: float  # on the last rank
    came: float  # when the last rank began to wait for it
    waits: list[tuple[float, float]]  # of each rank


def collectives(steps: Iterable[Sequence[RankStep]]) -> list[list[Collective]]:
    """Return the collectives of each step, in their order; without steps in which ranks differ."""
    found = []
    for together in steps:
        of_ranks = []
        for each in together:
            of_rank = [(launched, wait) for launched, wait in each.buckets]
            of_rank += [(wait.start, wait) for wait in each.others]
            of_ranks.append(sorted(of_rank, key=lambda one: one[0]))
        if len({tuple(wait.num_bytes for _, wait in of_rank) for of_rank in of_ranks}) > 1:
            continue
        found.append(
            [
                Collective(
                    same[0][1].num_bytes,
                    max(launched for launched, _ in same) / 1e9,
                    max(wait.start for _, wait in same) / 1e9,
                    [(wait.start / 1e9, wait.stop / 1e9) for _, wait in same],
                )
                for same in zip(*of_ranks, strict=True)
            ]
        )
    return found
