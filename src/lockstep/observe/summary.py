"""What a trace shows as a whole, and which rank is late, in what."""

from __future__ import annotations

import statistics
from array import array
from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple

from lockstep.observe.analysis import PHASES, StepTimes, union
from lockstep.observe.columns import Chosen
from lockstep.observe.records import LoaderUse, RankSpans, slowest_loader

# A rank is late if the others wait for it at least this part of the time, and longer than for any
# other by this factor.
_LATE_PART, _LATE_FACTOR = 0.05, 2.0


class Late(NamedTuple):
    """A rank for which the others wait."""

    rank: int
    phase: str  # that takes it longer than the others
    part: float  # of the time of the others
    seconds: float  # a step, in that phase
    excess: float  # seconds a step, over the median of the others
    waited: float  # seconds a step that the others wait for it, on average


class Evaluations(NamedTuple):
    """Evaluations of the whole trace, which are no part of its steps; means over the ranks."""

    number: float
    seconds: float
    awaited: float  # seconds for which a rank waits, in steps, while another one evaluates
    rank: int | None  # the one that is waited for longest so


class Summary(NamedTuple):
    """A trace as a whole, in parts of the time of all ranks' steps."""

    num_ranks: int
    num_steps: int
    seconds_per_step: float  # the mean over ranks and steps
    spread: tuple[float, float]  # quartiles
    phases: dict[str, float]
    evaluations: Evaluations
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
    rows = union((span.start, span.stop) for span in found.spans if span.name == "rows")
    for wait in found.spans if rows.starts else ():
        if wait.name == "wait" and wait.step in steps and wait.stop <= rows.until(wait.start):
            total += wait.num_bytes
    return total


def _collective_bytes(found: RankSpans, steps: Collection[int]) -> int:
    """Return the bytes that the rank gave to collectives of lockstep's in steps."""
    waits = (span for span in found.spans if span.name == "wait" and span.step in steps)
    return sum(wait.num_bytes for wait in waits)


def profiled(ranks: Sequence[RankSpans]) -> set[int]:
    """Return the numbers of steps that recording operators made longer, that of its end, too."""
    facts = [found.facts for found in ranks if "operators" in found.facts]
    return {n for each in facts for n in range(each["first"], each["first"] + each["profiled"] + 1)}


def counted_of(
    ranks: Sequence[RankSpans], steps: Sequence[Sequence[StepTimes]]
) -> Sequence[Sequence[StepTimes]]:
    """Return the steps without the first one, which is like no other, if there are enough.

    Without the :func:`profiled` ones, too.
    """
    counted = steps[1:] if len(steps) > 2 else steps
    slow = profiled(ranks)
    places = [p for p, each in enumerate(counted) if each[0].step not in slow] if slow else []
    return Chosen(counted, places) if places else counted


def _evaluations(ranks: Sequence[RankSpans], steps: Sequence[Sequence[StepTimes]]) -> Evaluations:
    lengths = array("d")
    for found in ranks:
        lengths.extend((s.stop - s.start) / 1e9 for s in found.spans if s.name == "evaluation")
    awaited: Counter[int] = Counter()
    for together in steps:
        for times in together:
            awaited.update(times.evaluations_of)
    seconds = awaited.total() / 1e9 / len(ranks)
    longest = awaited.most_common(1)[0][0] if awaited else None
    return Evaluations(len(lengths) / len(ranks), sum(lengths) / len(ranks), seconds, longest)


def summary(ranks: Sequence[RankSpans], steps: Sequence[Sequence[StepTimes]]) -> Summary:
    """Return what the report begins with."""
    counted = counted_of(ranks, steps)
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
    total, evaluations = max(1, sums["total"]), _evaluations(ranks, steps)
    low, _, high = statistics.quantiles(lengths, n=4) if len(lengths) > 1 else [lengths[0]] * 3
    facts, late = ranks[0].facts, late_rank(counted)
    slow = ranks if late is None else [found for found in ranks if found.rank == late.rank]
    return Summary(
        num_ranks=len(ranks),
        num_steps=len(steps),
        seconds_per_step=statistics.fmean(lengths),
        spread=(low, high),
        phases={phase: phases[phase] / total for phase in PHASES},
        evaluations=evaluations,
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
