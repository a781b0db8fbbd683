"""The ladder from the ideal step to the real one, of traces whose answers are known."""

from __future__ import annotations

import statistics
import subprocess
import sys
from pathlib import Path

import pytest

import lockstep
from lockstep.errors import TraceError
from lockstep.observe.analysis import step_times
from lockstep.observe.ladder import Baseline, Ladder, baseline_of, ladder
from lockstep.observe.page import rows_of
from lockstep.observe.quantities import duration, size, that_add_up
from lockstep.observe.records import RankSpans, Span
from lockstep.observe.summary import summary
from lockstep.observe.trace_files import read_folder
from lockstep.observe.words import in_words
from tests.observe.traced import MS, Slow, train_slowly

Step = list[tuple[str, int]]
STEP: Step = [("data", 1), ("forward", 1), ("backward", 4), ("wait", 1), ("optimizer", 1)]


def of(rank: int, *steps: Step) -> RankSpans:
    """A rank whose spans follow each other, by their lengths in ms."""
    spans, now = [], 0
    for number, step in enumerate(steps):
        for name, length in step:
            detail = "all_reduce" * (name == "wait")
            stop = now + length * MS
            if name != "other":
                spans.append(Span(name, now, stop, number, 0, detail, 100))
            now = stop
    return RankSpans(rank, {"host": "h"}, spans, [], [], {})


def ladder_of(
    *ranks: RankSpans, samples: int | None = None, baseline: Baseline | None = None
) -> Ladder:
    found = ladder(ranks, step_times(ranks), samples, baseline)
    total = sum(rung.seconds for rung in found.rungs)
    assert found.ideal + total == pytest.approx(found.seconds, abs=1e-12)
    for rank, parts in found.by_rank.items():
        totals = [s.total / 1e9 for each in step_times(ranks) for s in each if s.rank == rank]
        whole = sum(seconds for _, _, seconds in parts)
        assert whole == pytest.approx(statistics.fmean(totals), abs=1e-12)
    return found


def ms(found: Ladder) -> dict[str, tuple[float, float | None]]:
    """By name, the rungs and what they give back, in ms."""
    return {
        rung.name: (
            round(1e3 * rung.seconds, 6),
            None if rung.gives_back is None else round(1e3 * rung.gives_back, 6),
        )
        for rung in found.rungs
    }


def test_the_rungs_are_what_was_recorded() -> None:
    early = [("data", 1), ("forward", 1), ("backward", 2), ("wait", 5), ("other", 1)]
    late = [("data", 1), ("forward", 1), ("backward", 6), ("wait", 1), ("other", 1)]
    found = ladder_of(
        *(of(r, *[[*step, ("optimizer", 1)]] * 2) for r, step in enumerate((early, late)))
    )
    assert found.seconds == pytest.approx(0.011)
    # On one rank: data, forward and backward twice, which are 6 ms on average.
    assert found.one_rank == pytest.approx(0.014)
    assert found.speed_up == pytest.approx(14 / 11)
    assert found.ideal == pytest.approx(0.0055)
    assert ms(found) == {
        "computing": (0.5, None),
        "data": (1, 1),
        "waiting for rank 1": (2, 2),
        "transfer": (1, 1),
        "other": (1, 1),
    }
    assert not found.is_measured
    assert "estimated: data, forward and backward" in found.basis
    assert found.by_rank[0] == [
        ("forward", "forward", 0.001),
        ("backward", "backward", 0.002),
        ("optimizer", "optimizer", 0.001),
        ("data", "data", 0.001),
        ("wait", "waiting for rank 1", 0.004),
        ("transfer", "transfer", 0.001),
        ("other", "other", 0.001),
    ]


def test_slow_data_of_one_rank_give_back_more_than_their_rung() -> None:
    steps = [
        [("data", data), ("forward", 1), ("backward", 2), ("wait", wait), ("optimizer", 1)]
        for data, wait in ((1, 5), (5, 1))
    ]
    found = ladder_of(*(of(rank, *[step] * 3) for rank, step in enumerate(steps)))
    # The other rank doesn't wait, either: 5 ms of 10 less.
    assert ms(found)["data"] == (3, 5)
    assert ms(found)["waiting for rank 1"] == (2, 2)


def test_data_behind_which_others_compute_give_nothing_back() -> None:
    steps = [
        [("data", data), ("forward", 1), ("backward", 7 - data), ("wait", 1), ("optimizer", 1)]
        for data in (5, 0)
    ]
    found = ladder_of(*(of(rank, *[step] * 3) for rank, step in enumerate(steps)))
    assert ms(found)["data"] == (2.5, 0)


def test_what_begins_late_because_of_the_step_before_is_made_up_for() -> None:
    # Rank 1 saves for 3 ms without a meeting after it; rank 0 waits in the next step.
    first = [[*STEP, ("optimizer", 1)], [*STEP, ("save", 3), ("optimizer", 1)]]
    second: list[Step] = [
        [("forward", 2), ("wait", 4), ("optimizer", 1)],
        [("forward", 2), ("wait", 1), ("optimizer", 1)],
    ]
    found = ladder_of(*(of(r, *both) for r, both in enumerate(zip(first, second, strict=True))))
    assert ms(found)["saving"] == (0.75, 1.5)  # of two steps
    assert ms(found)["waiting for rank 1"] == (0.75, 0.75)


def test_a_measured_step_on_one_rank_is_scaled_by_the_samples() -> None:
    ranks = [of(rank, STEP, STEP) for rank in range(2)]
    alone = Baseline(0.005, 0.004, 8, num_steps=20, num_threads=1)
    found = ladder_of(*ranks, samples=32, baseline=alone)
    assert (found.one_rank, found.ideal) == (pytest.approx(0.020), pytest.approx(0.008))
    # The ranks compute faster than that: 6 ms.
    assert ms(found)["computing"] == (-2, None)
    assert (
        "measured in 20 steps on one rank of one thread with 8 samples, scaled to 32" in found.basis
    )
    assert [row.ms for row in rows_of(found)] == ["8.00", "-2.00", "1.00", "1.00", "8.00"]
    assert rows_of(found)[1].left == 75
    assert "2 ranks are 2.50 times as fast as one rank, by measurement" in in_words(
        summary(ranks, step_times(ranks)), found
    )
    unknown = ladder_of(*ranks, baseline=alone)
    assert not unknown.is_measured
    assert "can't be compared, as the samples of a step aren't known" in unknown.basis


def test_a_sharded_optimizer_is_divided_among_the_ranks() -> None:
    ranks = [of(rank, STEP, STEP)._replace(bucket_facts={0: {"deferred": True}}) for rank in (0, 1)]
    found = ladder_of(*ranks)
    assert found.ideal == pytest.approx(0.006)
    assert "computing" not in ms(found)
    assert "data, forward, backward and optimizer" in found.basis


def test_one_rank_has_a_ladder_without_a_speed_up() -> None:
    rank = of(
        0, [("data", 2), *STEP[1:3], ("optimizer", 1)], [("data", 2), *STEP[1:3], ("optimizer", 1)]
    )
    found = ladder_of(rank)
    assert ms(found) == {"data": (2, 2)}
    assert rows_of(found)[0].name == "computing"
    assert "times as fast" not in in_words(summary([rank], step_times([rank])), found)


def test_many_ranks_that_are_waited_for_have_one_rung() -> None:
    # In each of six steps, another rank comes 1 to 6 ms late.
    ranks = [
        of(
            rank,
            *(
                [
                    ("forward", 1 + late * (rank == late - 1)),
                    ("wait", 1 + late * (rank != late - 1)),
                    ("optimizer", 1),
                ]
                for late in range(1, 7)
            ),
        )
        for rank in range(6)
    ]
    found = ladder(ranks, step_times(ranks), None)
    names = [rung.name for rung in found.rungs if rung.kind == "wait"]
    assert names == [*(f"waiting for rank {r}" for r in (5, 4, 3)), "waiting for 3 other ranks"]
    assert ms(found)["waiting for 3 other ranks"][0] == round((1 + 2 + 3) * 5 / 36, 6)


def test_ranks_that_wait_in_different_operations_are_told_nothing_of() -> None:
    ranks = [of(rank, STEP, STEP) for rank in range(2)]
    spans = [s._replace(detail="other") if s.name == "wait" else s for s in ranks[1].spans]
    assert ms(ladder_of(ranks[0], ranks[1]._replace(spans=spans)))["data"] == (1, None)


def test_evaluations_are_no_part_of_a_step() -> None:
    whole = [[("evaluation", 50), *STEP], STEP]
    together = [of(rank, STEP, *whole) for rank in range(2)]
    assert ladder_of(*together[:2]).seconds == pytest.approx(0.008)
    found = summary(together, step_times(together))
    assert (found.evaluations.seconds, found.evaluations.awaited) == (0.05, 0)
    # One evaluates alone: what the other waits for that is no part of its step either.
    waiting = [("data", 1), ("forward", 1), ("backward", 4), ("wait", 51), ("optimizer", 1)]
    alone = [of(0, STEP, *whole), of(1, STEP, waiting, STEP)]
    assert ladder_of(*alone).seconds == pytest.approx(0.008)
    assert "waiting for rank 0" not in ms(ladder_of(*alone))
    evaluations = summary(alone, step_times(alone)).evaluations
    assert (evaluations.awaited, evaluations.rank) == (0.025, 0)
    # A rank that is late besides is waited for.
    both = [
        of(0, STEP, *whole),
        of(
            1,
            STEP,
            [("evaluation", 50), ("forward", 3), ("backward", 2), ("wait", 2), ("optimizer", 1)],
            STEP,
        ),
    ]
    assert ms(ladder(both, step_times(both), None))["waiting for rank 0"][0] == round(1 / 6, 6)


def test_a_planted_sleep_is_the_rung_that_it_is(tmp_path: Path) -> None:
    slow = Slow("data", 1, 0.1)
    lockstep.launch(train_slowly, 2, (tmp_path, slow), ranks="threads")
    ranks = read_folder(tmp_path)
    steps = step_times(ranks)[1:]
    found = ladder(ranks, steps, None)
    by_name = {rung.name: rung for rung in found.rungs}
    # Half of each sleep is in the mean over the ranks, and rank 0 waits meanwhile.
    [slept] = [seconds for kind, _, seconds in found.by_rank[1] if kind == "data"]
    assert slept >= 0.1
    assert by_name["data"].seconds >= 0.05
    assert by_name["waiting for rank 1"].seconds > 0
    assert found.ideal + sum(r.seconds for r in found.rungs) == pytest.approx(found.seconds)


def test_a_trace_beside_another_is_its_baseline(tmp_path: Path) -> None:
    assert baseline_of(tmp_path) is None
    slow = Slow("data", 0, 0.0)
    lockstep.launch(train_slowly, 1, (tmp_path / "baseline", slow), ranks="threads")
    found = baseline_of(tmp_path)
    assert found is not None
    assert 0 < found.computing < found.seconds
    assert found.num_steps == 5
    assert found.samples is None  # torch's loader doesn't tell
    lockstep.launch(train_slowly, 2, (tmp_path / "two" / "baseline", slow), ranks="threads")
    with pytest.raises(TraceError, match="of 2 ranks, and one is needed"):
        baseline_of(tmp_path / "two")


def test_numbers_have_three_digits_and_a_unit() -> None:
    told = [duration(each) for each in (0, 2.5e-7, 4.2e-5, 0.00999, 0.0117, 0.9999, 75, 1234)]
    assert told == [
        "0 ms",
        "0.25 µs",
        "42.0 µs",
        "9.99 ms",
        "11.7 ms",
        "1.00 s",
        "75.0 s",
        "1,234 s",
    ]
    assert [size(each) for each in (0, 999, 1500, 2.5e7, 3e9)] == [
        "0 bytes",
        "999 bytes",
        "1.50 kB",
        "25.0 MB",
        "3.00 GB",
    ]
    assert that_add_up([3.333, 3.333, 3.334]) == ["3.3", "3.4", "3.3"]
    assert that_add_up([]) == []


TRAIN = """
import torch
import lockstep

world = lockstep.init()
model = lockstep.parallelize(torch.nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
dataset = torch.utils.data.TensorDataset(torch.ones(40 * 6, 8))
things = {"model": model, "optimizer": optimizer}
steps = lockstep.steps(lockstep.DataLoader(dataset, 6), "saved", epochs=1, save_every=5, **things)
for (x,) in steps:
    if steps.step in (0, 25):
        lockstep.save("mine", **things)
    lockstep.mean(model(x).square()).backward()
    optimizer.step()
    optimizer.zero_grad()
print("world size", world.world_size, "ended")
"""


@pytest.mark.long
def test_the_command_measures_one_rank_before(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    command = [sys.executable, "-m", "lockstep", "run", "-n", "2", "--trace", "run", "--baseline"]
    done = subprocess.run([*command, "train.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "30 steps on one rank" in done.stdout
    assert "world size 1 ended" not in done.stdout
    assert done.stdout.count("world size 2 ended") == 2
    # What that wrote would be what the run goes on from.
    assert [each.name for each in sorted((tmp_path / "mine").glob("0*"))] == ["000001", "000002"]
    found = baseline_of(tmp_path / "run")
    assert found is not None
    assert (found.num_steps, found.samples) == (29, 6)
    ranks = read_folder(tmp_path / "run")
    assert found.num_threads == ranks[0].facts["threads"]
    assert len(step_times(ranks)) == 40
    assert ladder(ranks, step_times(ranks), 6, found).is_measured
