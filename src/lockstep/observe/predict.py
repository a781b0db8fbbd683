"""How long a step would take on more ranks, as far as the trace of one run tells.

By its own clock, which stands still while it waits, a rank computes for some time, launches each
bucket at some time, and needs the sums at some time. On N ranks the same happens, but:

1. An all-reduce takes as long as N ranks need for it over the network. It starts when its bucket is
   launched and the one before is done; what isn't done when the sums are needed, adds to the step.
2. Wherever the ranks meet, they wait for the slowest of N. Each further rank draws from what the
   ranks of the trace differed by, so that none is slower than the slowest that was seen.
3. With the same global batch, data, forward and backward shrink as the rank's part of it does, and
   the rest doesn't. That is the best case: small operations take as long for a smaller part.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from lockstep.errors import TraceError
from lockstep.observe.analysis import StepTimes
from lockstep.observe.records import RankSpans
from lockstep.observe.summary import length
from lockstep.observe.timelines import Collective, Kind, Timeline, collectives, rank_steps

# Latencies of a message between two hosts, in us, and bandwidths in Gbit/s, as they usually are.
NETWORKS = {
    "1gbe": (50.0, 1.0),
    "10gbe": (30.0, 10.0),
    "25gbe": (20.0, 25.0),
    "100gbe": (10.0, 100.0),
    "200gb-ib": (3.0, 200.0),
    "400gb-ib": (2.0, 400.0),
}
_MOST_RANKS = 1024
_FITTED_WAITS = 1500  # more would take seconds
_NUM_HALVINGS = 8  # of a power of ten, which is 1 %


class Links(NamedTuple):
    """The links between ranks; each rank sends and receives at the same time."""

    latency: float  # seconds that a message takes, however small
    bandwidth: float  # bytes a second
    # Whether transfers go on while the program computes, or else while it waits for them.
    in_background: bool = True

    def all_reduce_seconds(self, num_bytes: float, num_ranks: int) -> float:
        """Return the time of an all-reduce, on a ring or a tree, whichever is faster."""
        seconds = num_bytes / self.bandwidth
        ring = 2 * (num_ranks - 1) * (self.latency + seconds / num_ranks)
        tree = 2 * math.ceil(math.log2(num_ranks)) * (self.latency + seconds)
        return min(ring, tree)


def parse_network(text: str) -> Links:
    """Return the network of this name, or of ``LATENCY_US,GBIT``.

    Raises:
        TraceError: If it is neither.
    """
    latency = gigabits = math.nan
    with contextlib.suppress(ValueError):
        latency, gigabits = NETWORKS.get(text.lower()) or map(float, text.split(","))
    if not (0 <= latency < math.inf and 0 < gigabits < math.inf):
        raise TraceError(
            f"--network {text} isn't known: give the latency of a message in microseconds and the "
            f"bandwidth in Gbit/s, as in 20,25, or one of {', '.join(NETWORKS)}."
        )
    return Links(latency / 1e6, gigabits * 1e9 / 8)


_Fit = tuple[float, Links]


def fit(steps: Sequence[Sequence[Collective]]) -> _Fit:
    """Return the mean error of the ends of waits, and the network on which it is smallest.

    If all collectives have about one size, the latency can't be told, and is taken for 0.
    """
    sizes = [each.num_bytes for step in steps for each in step]
    has_latency = max(sizes) > 2 * min(sizes)

    def with_latency(in_background: bool, latency: float) -> _Fit:
        return _least(lambda power: _error(steps, Links(latency, 10**power, in_background)), 5, 13)

    if not has_latency:
        return min(with_latency(True, 0.0), with_latency(False, 0.0))
    return min(
        _least(lambda power: with_latency(True, 10**power), -7, -1),
        _least(lambda power: with_latency(False, 10**power), -7, -1),
    )


def _least(fit_of: Callable[[float], _Fit], first: int, last: int) -> _Fit:
    """Return the best fit between two numbers: of whole numbers, then of ever finer fractions."""
    tried = {float(number): fit_of(number) for number in range(first, last + 1)}
    for halvings in range(1, _NUM_HALVINGS + 1):
        best = min(tried, key=tried.__getitem__)
        for number in (best - 0.5**halvings, best + 0.5**halvings):
            tried[number] = fit_of(number)
    return min(tried.values())


def _error(steps: Sequence[Sequence[Collective]], network: Links) -> _Fit:
    """Return by how much waits end earlier or later than on ``network``, on average."""
    errors = []
    for step in steps:
        link_is_free = 0.0
        for num_bytes, launched, came, waits in step:
            start = max(link_is_free, launched if network.in_background else came)
            link_is_free = start + network.all_reduce_seconds(num_bytes, len(waits))
            errors += [abs(stop - max(start, link_is_free)) for start, stop in waits]
    return statistics.fmean(errors), network


def exposed(timeline: Timeline, network: Links, num_ranks: int, factor: float = 1.0) -> float:
    """Return for how many seconds of a step a rank waits for transfers, if none comes late."""
    delay = link_is_free = 0.0
    under_way: deque[float] = deque()  # when transfers of buckets will be done
    for shrinking, fixed, kind, num_bytes in timeline.events:
        now = factor * shrinking + fixed + delay
        if kind is Kind.LAUNCH and not network.in_background:
            continue
        if kind is Kind.BUCKET and network.in_background:
            delay += max(0.0, under_way.popleft() - now)
            continue
        start = max(link_is_free, now)
        link_is_free = start + network.all_reduce_seconds(num_bytes, num_ranks)
        if kind is Kind.LAUNCH:
            under_way.append(link_is_free)
        else:
            delay += link_is_free - now
    return delay


def expected_maximum(draws: Sequence[float], num_ranks: int) -> float:
    """Return the expected largest of ``num_ranks`` numbers out of ``draws``, with replacement."""
    parts = [(index / len(draws)) ** num_ranks for index in range(len(draws) + 1)]
    return sum(
        value * (above - below)
        for value, below, above in zip(sorted(draws), parts, parts[1:], strict=False)
    )


class PredictedStep(NamedTuple):
    """A step on some number of ranks, in seconds."""

    num_ranks: int
    seconds: float
    transfer: float  # exposed
    waiting: float  # for the slowest rank, of an average one
    efficiency: float  # computing in the whole step
    # With the global batch of the trace, None for more ranks than it has samples.
    same_batch_seconds: float | None


class Prediction(NamedTuple):
    """The steps of one run on other numbers of ranks."""

    network: Links
    is_given: bool  # rather than fitted to the trace
    num_samples: int  # collectives of the trace, to which it is fitted
    fit_error: float  # in seconds, of the ends of their waits
    measured_ranks: int
    measured: PredictedStep  # the run itself, as it was
    computing_seconds: float  # on an average rank, in the steps that the model is of
    rows: list[PredictedStep]  # as the model has it, that of the trace's number of ranks included


def predict(
    ranks: Sequence[RankSpans],
    steps: Sequence[Sequence[StepTimes]],
    network: Links | None = None,
    global_batch: int | None = None,
) -> Prediction | None:
    """Predict the steps of a traced run on 2, 4, 8 to 1,024 ranks, and on as many as it had.

    Args:
        ranks: The trace.
        steps: Its steps that count.
        network: The one between the ranks; by default what fits the trace best.
        global_batch: Its samples, if they are known.

    Returns:
        None if the ranks of the trace never met in a collective of lockstep's.
    """
    of_steps = rank_steps(ranks, steps)
    timelines = [[each.timeline() for each in together] for together in of_steps]
    num_ranks, num_samples, error = len(ranks), 0, 0.0
    if num_ranks < 2 or not any(each.events for together in timelines for each in together):
        return None
    measured = statistics.fmean(length(together) / 1e9 for together in steps)
    differences = _differences(timelines)

    def row(number: int, over: Links) -> PredictedStep:
        waiting = sum(part * expected_maximum(draws, number) for part, draws in differences)
        base = _typical(timelines, over, number)
        transfer = base - computing
        factor = num_ranks / number
        same = _typical(timelines, over, number, factor) + waiting
        fits = global_batch is None or number <= global_batch
        seconds = base + waiting
        return PredictedStep(
            number, seconds, transfer, waiting, computing / seconds, same if fits else None
        )

    computing = _typical(timelines, None, num_ranks)
    is_given = network is not None
    if network is None:
        measured_steps = collectives(of_steps)
        num_samples = sum(map(len, measured_steps))
        if not num_samples:  # the ranks never met in the same collectives
            return None
        enough = -(-num_samples * num_ranks // _FITTED_WAITS)
        error, network = fit(measured_steps[::enough])
    powers = {2**power for power in range(1, _MOST_RANKS.bit_length())}
    waiting = statistics.fmean(times.waiting for each in steps for times in each) / 1e9
    transfer = statistics.fmean(times.transfer for each in steps for times in each) / 1e9
    computed = measured - waiting - transfer
    rows = [row(number, network) for number in sorted(powers | {num_ranks})]
    return Prediction(
        network=network,
        is_given=is_given,
        num_samples=num_samples,
        fit_error=error,
        measured_ranks=num_ranks,
        measured=PredictedStep(
            num_ranks, measured, transfer, waiting, computed / measured, measured
        ),
        computing_seconds=computing,
        rows=rows,
    )


def _typical(
    timelines: Sequence[Sequence[Timeline]],
    network: Links | None,
    num_ranks: int,
    factor: float = 1.0,
) -> float:
    """Return the mean over steps and ranks, with transfers over ``network``."""
    return statistics.fmean(
        statistics.fmean(
            each.computing(factor) + (exposed(each, network, num_ranks, factor) if network else 0.0)
            for each in together
        )
        for together in timelines
    )


def _differences(timelines: Sequence[Sequence[Timeline]]) -> list[tuple[float, list[float]]]:
    """For each segment: in which part of the steps it is, and how ranks differ from their mean."""
    by_segment: dict[int, list[float]] = defaultdict(list)
    for together in timelines:
        segments = [each.segments() for each in together]
        if len({len(each) for each in segments}) > 1:  # the ranks met otherwise
            segments = [[each.computing()] for each in together]
        # Deviations from the mean of few ranks are smaller than those from the true mean.
        scale = math.sqrt(len(together) / (len(together) - 1))
        for index, times in enumerate(zip(*segments, strict=True)):
            mean = statistics.fmean(times)
            by_segment[index] += [scale * (time - mean) for time in times]
    whole = len(timelines) * len(timelines[0])
    return [(len(draws) / whole, draws) for draws in by_segment.values()]
