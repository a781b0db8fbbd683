"""``lockstep report``: how a step would take on more ranks, told from one trace."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from lockstep.errors import TraceError
from lockstep.observe.analysis import step_times
from lockstep.observe.predict import (
    NETWORKS,
    Links,
    Prediction,
    expected_maximum,
    exposed,
    parse_network,
    predict,
)
from lockstep.observe.records import BucketTimes, RankSpans, Span
from lockstep.observe.timelines import Event, Kind, Timeline

MB = 1_000_000
# A message takes 1 ms, and 1 MB takes 1 ms more.
NETWORK = Links(1e-3, 1e9)
LAYERS = (4 * MB, 20 * MB, 1 * MB, 8 * MB)  # in the order of the backward
FORWARD, BACKWARD, OPTIMIZER = 0.010, 0.010, 0.005
GAP = 1e-8  # between waits


def test_an_all_reduce_takes_a_ring_or_a_tree() -> None:
    # A ring sends 2 (N - 1) messages of a part each; a tree sends it all up and down.
    assert NETWORK.all_reduce_seconds(20 * MB, 2) == pytest.approx(2 * (0.001 + 0.010))
    assert NETWORK.all_reduce_seconds(20 * MB, 4) == pytest.approx(6 * (0.001 + 0.005))
    assert NETWORK.all_reduce_seconds(20 * MB, 1024) == pytest.approx(20 * (0.001 + 0.020))
    assert NETWORK.all_reduce_seconds(0, 1024) == pytest.approx(20 * 0.001)
    assert NETWORK.all_reduce_seconds(0, 9) == pytest.approx(8 * 0.001)  # one more level than 8
    assert NETWORK.all_reduce_seconds(20 * MB, 1) == 0


def timeline(*events: tuple[float, Kind, int], length: float = 0.030) -> Timeline:
    """All of it shrinks with the batch; times in seconds."""
    return Timeline([Event(time, 0.0, kind, size) for time, kind, size in events], length, 0.0)


ONE = timeline((0.010, Kind.LAUNCH, 20 * MB), (0.030, Kind.BUCKET, 20 * MB))


def test_what_is_not_hidden_adds_to_the_step() -> None:
    # Launched at 10 ms and needed at 30: 2 ranks take 22 ms, and 4 take 36.
    assert exposed(ONE, NETWORK, 2) == pytest.approx(0.002)
    assert exposed(ONE, NETWORK, 4) == pytest.approx(0.016)
    assert exposed(ONE, NETWORK, 1) == 0
    assert exposed(ONE, NETWORK._replace(in_background=False), 2) == pytest.approx(0.022)
    # With half of the batch there is half as much time to hide it.
    assert exposed(ONE, NETWORK, 2, 0.5) == pytest.approx(0.012)


def test_transfers_follow_one_another() -> None:
    launches = (0.010, Kind.LAUNCH, 20 * MB), (0.020, Kind.LAUNCH, 8 * MB)
    needs = (0.030, Kind.BUCKET, 20 * MB), (0.030, Kind.BUCKET, 8 * MB)
    # 22 ms from 10 on, then 10 ms: until 42.
    assert exposed(timeline(*launches, *needs), NETWORK, 2) == pytest.approx(0.012)
    # An operation that is needed at once waits for the link as well, until 32, and takes 2 ms.
    asked = timeline(launches[0], (0.015, Kind.OTHER, 0), (0.030, Kind.BUCKET, 20 * MB))
    assert exposed(asked, NETWORK, 2) == pytest.approx(0.019)


def test_ranks_meet_where_they_wait() -> None:
    waits = (0.010, Kind.OTHER, 0), (0.025, Kind.BUCKET, 1), (0.026, Kind.BUCKET, 1)
    assert timeline(*waits).segments() == pytest.approx([0.010 + 0.005, 0.015])
    assert ONE.segments() == [0.030]
    assert timeline().segments() == [0.030]


def test_the_largest_of_some_draws() -> None:
    assert expected_maximum([1.0, 0.0], 1) == 0.5
    assert expected_maximum([1.0, 0.0], 2) == 0.75
    assert expected_maximum([3.0, 1.0, 2.0], 1024) == pytest.approx(3.0)
    drawn = random.Random(0)
    draws = [drawn.expovariate(1) for _ in range(5000)]
    assert expected_maximum(draws, 4) == pytest.approx(1 + 1 / 2 + 1 / 3 + 1 / 4, rel=0.05)


def test_networks_have_names_or_numbers() -> None:
    assert parse_network("20,25") == Links(20e-6, 25e9 / 8)
    assert parse_network("400GB-ib") == Links(2e-6, 50e9)
    assert all(parse_network(name).in_background for name in NETWORKS)
    for text in ("", "10", "1,2,3", "a,b", "-1,5", "1,0", "nan,1", "1,inf", "20gbe"):
        with pytest.raises(TraceError, match=r"--network .* isn't known: .*25gbe"):
            parse_network(text)


def trace_of(
    num_ranks: int,
    network: Links = NETWORK,
    sizes: Sequence[int] = LAYERS,
    slowness: Callable[[int, int], float] = lambda rank, step: 1.0,
    num_steps: int = 40,
) -> list[RankSpans]:
    """Let ranks train over a network, each on its clock, and trace them.

    A layer's forward and backward take ``slowness(rank, step)`` times as long as FORWARD, BACKWARD.
    """
    spans: list[list[Span]] = [[] for _ in range(num_ranks)]
    buckets: list[list[BucketTimes]] = [[] for _ in range(num_ranks)]
    now = [0.0] * num_ranks
    for step in range(num_steps):
        launches = []
        for rank, start in enumerate(now):
            factor = slowness(rank, step)
            begin = now[rank] = start + FORWARD * len(sizes) * factor
            spans[rank].append(span("forward", start, begin, step))
            launches.append([begin + (k + 1) * BACKWARD * factor for k in range(len(sizes))])
        at = [took[-1] for took in launches]  # where each rank is
        free = 0.0
        for number, size in enumerate(sizes):
            local_launches = [took[number] for took in launches]
            start = max(free, *(local_launches if network.in_background else at))
            free = start + network.all_reduce_seconds(size, num_ranks)
            for rank, launched in enumerate(local_launches):
                stop = max(at[rank], free)
                spans[rank].append(span("wait", at[rank], stop, step, "all_reduce", size))
                times = (round(1e9 * each) for each in (launched, launched, stop))
                buckets[rank].append(BucketTimes(*times, step, number))
                at[rank] = stop + GAP
        for rank, end in enumerate(at):
            spans[rank].append(span("backward", now[rank], end, step))
            now[rank] = end + OPTIMIZER
            spans[rank].append(span("optimizer", end, now[rank], step))
    facts: dict[str, Any] = {"host": "h"}
    sent = {number: {"bytes": size} for number, size in enumerate(sizes)}
    return [RankSpans(r, facts, spans[r], buckets[r], [], sent) for r in range(num_ranks)]


def span(name: str, start: float, stop: float, step: int, detail: str = "", size: int = 0) -> Span:
    return Span(name, round(1e9 * start), round(1e9 * stop), step, 0, detail, size)


def predicted(ranks: list[RankSpans], *more: Any) -> tuple[Prediction, dict[int, Any]]:
    found = predict(ranks, step_times(ranks)[1:], *more)
    assert found is not None
    return found, {row.num_ranks: row for row in found.rows}


def measured(ranks: list[RankSpans]) -> float:
    steps = step_times(ranks)[1:]
    return statistics.median(max(times.total for times in each) for each in steps) / 1e9


@pytest.mark.parametrize("is_given", [True, False])
@pytest.mark.parametrize(
    "network",
    [NETWORK, Links(1e-4, 1e10), Links(5e-3, 1e10), Links(1e-4, 5e8)],
    ids=["both", "fast", "latency", "bandwidth"],
)
def test_equal_ranks_are_predicted(network: Links, is_given: bool) -> None:
    found, rows = predicted(trace_of(2, network), *([network] if is_given else []))
    assert [*rows] == [2**power for power in range(1, 11)]
    for num_ranks in (2, 4, 8, 64):
        true = measured(trace_of(num_ranks, network, num_steps=3))
        rel = 1e-3 if is_given else 0.05
        assert rows[num_ranks].seconds == pytest.approx(true, rel=rel), num_ranks
        assert rows[num_ranks].waiting == pytest.approx(0, abs=1e-6)
    computing = 4 * (FORWARD + BACKWARD) + OPTIMIZER
    assert found.computing_seconds == pytest.approx(computing)
    assert found.measured.seconds == pytest.approx(measured(trace_of(2, network)))
    assert found.measured.efficiency == pytest.approx(computing / found.measured.seconds)
    assert rows[8].efficiency * rows[8].seconds == pytest.approx(computing)
    assert found.is_given == is_given


def test_one_bucket_is_predicted_exactly() -> None:
    # 10 ms, and then 10 until its only bucket is launched and needed; 5 ms for the optimizer.
    _, rows = predicted(trace_of(2, sizes=[20 * MB]), NETWORK)
    assert rows[2].seconds == pytest.approx(0.020 + 2 * (0.001 + 0.010) + 0.005)
    assert rows[4].seconds == pytest.approx(0.020 + 6 * (0.001 + 0.005) + 0.005)
    assert rows[4].transfer == pytest.approx(0.036)


def test_ranks_that_differ_wait_for_the_slowest() -> None:
    drawn = random.Random(1)

    def slowness(rank: int, step: int) -> float:
        return 1 + 0.3 * drawn.uniform(-1, 1)

    _, rows = predicted(trace_of(2, slowness=slowness, num_steps=100))
    before = 0.0
    for num_ranks in (2, 4, 8, 16):
        true = measured(trace_of(num_ranks, slowness=slowness, num_steps=100))
        assert rows[num_ranks].seconds == pytest.approx(true, rel=0.05), num_ranks
        assert rows[num_ranks].waiting > before
        before = rows[num_ranks].waiting


def test_a_step_that_is_long_for_all_ranks_makes_nobody_wait() -> None:
    _, rows = predicted(trace_of(2, slowness=lambda rank, step: 5.0 if step % 10 == 0 else 1.0))
    assert rows[1024].waiting == pytest.approx(0, abs=1e-6)


def test_the_same_global_batch_shrinks_on_each_rank() -> None:
    _, rows = predicted(trace_of(2, Links(0.0, math.inf)), Links(0.0, math.inf), 8)
    computing = 4 * (FORWARD + BACKWARD)
    assert rows[2].same_batch_seconds == pytest.approx(computing + OPTIMIZER)
    assert rows[8].same_batch_seconds == pytest.approx(computing / 4 + OPTIMIZER)
    assert rows[16].same_batch_seconds is None  # it has 8 samples


def test_transfers_that_take_place_in_waits_are_told_from_others() -> None:
    for in_background in (True, False):
        network = NETWORK._replace(in_background=in_background)
        found, rows = predicted(trace_of(2, network))
        assert found.network.in_background == in_background
        assert found.network.latency == pytest.approx(network.latency, rel=0.1)
        assert found.network.bandwidth == pytest.approx(network.bandwidth, rel=0.1)
        true = measured(trace_of(8, network, num_steps=3))
        assert rows[8].seconds == pytest.approx(true, rel=0.05)


def test_the_latency_of_transfers_of_one_size_is_not_known() -> None:
    found, rows = predicted(trace_of(2, sizes=[4 * MB] * 3))
    assert found.network.latency == 0
    assert rows[2].seconds == pytest.approx(measured(trace_of(2, sizes=[4 * MB] * 3)), rel=0.02)


def test_ranks_that_never_meet_tell_nothing() -> None:
    ranks = trace_of(2)
    alone = [r._replace(spans=[s for s in r.spans if s.name != "wait"]) for r in ranks]
    assert predict(alone, step_times(alone)) is None
    assert predict(ranks[:1], step_times(ranks[:1])) is None
    assert predict(alone, step_times(alone), NETWORK) is None
