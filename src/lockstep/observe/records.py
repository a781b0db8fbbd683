"""What one rank has recorded in a trace, and which of its batches are trained on or evaluated.

A batch is trained on if a backward begins before its loader returns the next one, or ends its
epoch. Another one is evaluated if it was loaded without gradients, or if its loader returns none
that is trained on. The rest are dropped: an iteration failed, say, before its backward.
"""

from __future__ import annotations

import itertools
from array import array
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from lockstep.observe.columns import Columns, as_columns, in_order, is_among

END_OF_EPOCH = -1  # in place of a number of samples
# How many loaders and buckets a rank tells apart: in memory their facts take more than in a file.
MOST_LOADERS, MOST_BUCKETS = 1 << 10, 1 << 13
_ENDS_EVALUATION = ("data", "backward", "average", "optimizer")


class Span(NamedTuple):
    """Something that a rank did, by the clock of rank 0, in nanoseconds."""

    name: str
    start: int
    stop: int
    step: int
    thread: int  # 0 for the program's own
    detail: str  # of a wait, the operation
    num_bytes: int  # of a wait, what this rank gave to the operation


class BucketTimes(NamedTuple):
    """The way of one bucket in one step."""

    ready: int
    launched: int
    done: int
    step: int
    number: int


class GivenBatch(NamedTuple):
    """What a loader returned at some time: a batch, or that the epoch is over."""

    time: int
    step: int
    thread: int
    loader: int
    num_samples: int  # of this rank; 0 if the loader doesn't tell, or END_OF_EPOCH
    with_gradients: bool  # whether autograd was on


class StepEnd(NamedTuple):
    """What a rank noted at the end of a step."""

    step: int
    time: int
    num_samples: int  # of this rank, from which it computed gradients; 0 if they aren't known
    memory: dict[str, int]  # in bytes, by kind; empty at the end of most steps


class RankSpans(NamedTuple):
    """All that one rank has recorded."""

    rank: int
    facts: dict[str, Any]
    spans: Sequence[Span]
    buckets: Sequence[BucketTimes]
    logged: Sequence[dict[str, Any]]
    bucket_facts: dict[int, dict[str, Any]]  # by number: index, parameters, bytes
    step_ends: Sequence[StepEnd] = ()
    batches: Sequence[GivenBatch] = ()
    loaders: dict[int, dict[str, Any]] = {}  # noqa: RUF012  by number: dataset, workers, persistent


class LoaderUse(NamedTuple):
    """What a program's thread spent on a loader, of one rank."""

    number: int
    dataset: str  # the name of its class
    workers: int
    persistent: bool  # whether it keeps its workers
    trains: bool  # whether gradients are computed from its batches
    num_firsts: int  # batches that began an epoch, as far as the trace shows it
    firsts: float  # seconds
    num_others: int
    others: float  # seconds

    @property
    def seconds(self) -> float:
        """The time that the program waited for its batches."""
        return self.firsts + self.others

    @property
    def longer(self) -> float:
        """The part of it by which batches that begin an epoch take longer than the others."""
        return self.firsts - self.num_firsts * self.others / max(1, self.num_others)


def loader_uses(found: RankSpans, steps: Collection[int]) -> list[LoaderUse]:
    """Return the rank's loaders, with what these steps spent on them."""
    trained = itertools.compress(found.batches, trained_batches(found))
    trains = {batch.loader for batch in trained}
    times = _times(found, steps)
    uses = []
    for number, facts in sorted(found.loaders.items()):
        firsts, others = times[number]
        words = facts["dataset"], facts["workers"], facts["persistent"], number in trains
        uses.append(LoaderUse(number, *words, len(firsts), sum(firsts), len(others), sum(others)))
    return uses


def _times(
    found: RankSpans, steps: Collection[int]
) -> dict[int, tuple[array[float], array[float]]]:
    """By loader, the seconds that the first batches of epochs took, and those of the others."""
    lengths: dict[str, array[int]] = defaultdict(lambda: array("q"))  # by loader, of its loads
    times: dict[int, tuple[array[float], array[float]]]
    times = defaultdict(lambda: (array("d"), array("d")))
    num_loads = Counter[int]()
    within = set[int]()  # the loaders that have begun an epoch
    for span in found.spans:  # these are sorted by their stops
        if span.name == "data":
            lengths[span.detail].append(span.stop - span.start)
    for _, batch in _in_time(found.batches):
        loads, number = lengths[str(batch.loader)], num_loads[batch.loader]
        num_loads[batch.loader] += 1
        if batch.num_samples == END_OF_EPOCH:
            within.discard(batch.loader)
            continue
        if batch.step in steps and number < len(loads):
            times[batch.loader][batch.loader in within].append(loads[number] / 1e9)
        within.add(batch.loader)
    return times


def slowest_loader(ranks: Sequence[RankSpans], steps: Collection[int]) -> LoaderUse | None:
    """Return the loader of training for which these ranks wait longest, if any is known."""
    uses = [use for found in ranks for use in loader_uses(found, steps) if use.trains]
    return max(uses, key=lambda use: use.seconds, default=None)


def tell_apart(found: RankSpans, spans: Columns[Span], ends: Columns[StepEnd]) -> None:
    """Put evaluations among the rank's ``spans``, and their samples to the ``ends`` of its steps.

    Spans of data get the number of their loader as their detail.
    """
    trained = trained_batches(found)
    steps = in_order(ends.of("step"))
    samples = array("q", bytes(8 * len(steps)))
    for batch in itertools.compress(found.batches, trained):
        if is_among(steps, batch.step):
            samples[bisect_left(steps, batch.step)] += batch.num_samples
    for index, step in enumerate(ends.of("step")):
        ends.set(index, "num_samples", samples[bisect_left(steps, step)])
    del samples, steps
    spans.sort("stop")
    _put_loaders(spans, found.batches)
    evaluations = Columns(Span, _evaluations(spans, found.batches, trained))
    for span in spans:
        if span.name == "evaluation":
            evaluations.append(span)
    evaluations.sort("start")
    spans.remove("name", "evaluation")
    for span in _joined(evaluations):
        spans.append(span)


def _joined(evaluations: Iterable[Span]) -> Iterator[Span]:
    """Yield them as one where they touch or overlap; they are sorted by their starts."""
    joined = None
    for span in evaluations:
        if joined is None or span.start > joined.stop:
            if joined is not None:
                yield joined
            joined = span
        elif span.stop > joined.stop:
            joined = joined._replace(stop=span.stop)
    if joined is not None:
        yield joined


def trained_batches(found: RankSpans) -> bytearray:
    """Return, for each batch, whether gradients were computed from it.

    Of loaders that other threads iterate over, these are all.
    """
    batches, trained = found.batches, bytearray(len(found.batches))
    backwards = iter(_starts(found.spans, ("backward", "average")))
    backward = next(backwards, None)
    loaded: dict[int, int] = {}  # by loader
    # Loaded without gradients, a batch is trained on only if a backward is what follows.
    latest = array("i")
    for index, batch in _in_time(batches):
        if batch.thread:
            trained[index] = batch.num_samples != END_OF_EPOCH
            continue
        if backward is not None and backward <= batch.time:
            for each in (*loaded.values(), *latest):
                trained[each] = True
            loaded.clear()
        while backward is not None and backward <= batch.time:
            backward = next(backwards, None)
        del latest[:]
        loaded.pop(batch.loader, None)
        if batch.num_samples == END_OF_EPOCH:
            continue
        if batch.with_gradients:
            loaded[batch.loader] = index
        else:
            latest.append(index)
    for each in (*loaded.values(), *latest) if backward is not None else ():
        trained[each] = True
    return trained


def _starts(spans: Iterable[Span], names: Sequence[str]) -> array[int]:
    """Return when the program's thread or another began spans of these names, sorted."""
    return in_order(span.start for span in spans if span.name in names)


def _in_time(batches: Sequence[GivenBatch]) -> Iterator[tuple[int, GivenBatch]]:
    """Yield the batches by their times, and the place of each."""
    for index in as_columns(GivenBatch, batches).order("time"):
        yield index, batches[index]


def _put_loaders(spans: Columns[Span], batches: Iterable[GivenBatch]) -> None:
    """Put their loaders to the spans of data."""
    data = spans.order("thread", "stop", places=spans.places("name", "data"))
    threads, stops = spans.column("thread"), spans.column("stop")
    for batch in batches:
        key = batch.thread, batch.time
        before = bisect_right(data, key, key=lambda place: (threads[place], stops[place]))
        if before and threads[data[before - 1]] == batch.thread:
            spans.set(data[before - 1], "detail", str(batch.loader))


def _evaluations(
    spans: Iterable[Span], batches: Sequence[GivenBatch], trained: Sequence[int]
) -> Iterator[Span]:
    """Yield an evaluation for each batch, from its load to what follows."""
    marks = _starts((span for span in spans if not span.thread), _ENDS_EVALUATION)
    starts, stops = array("q"), array("q")  # of loads
    for span in spans:
        if span.name == "data" and not span.thread:
            starts.append(span.start)
            stops.append(span.stop)
    trains = {batch.loader for batch in itertools.compress(batches, trained)}
    for index, batch in _in_time(batches):
        is_evaluated = not trained[index] and (
            not batch.with_gradients or batch.loader not in trains
        )
        before = bisect_right(stops, batch.time) - 1
        if before >= 0 and is_evaluated and not batch.thread:
            start, stop = starts[before], stops[before]
            if batch.num_samples != END_OF_EPOCH:
                following = bisect_left(marks, stop)
                stop = marks[following] if following < len(marks) else stop
            yield Span("evaluation", start, stop, batch.step, 0, "", 0)
