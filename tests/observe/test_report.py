"""``lockstep report``: where the time goes, and which rank is late, in what."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import lockstep
from lockstep import cli
from lockstep.errors import TraceError
from lockstep.observe import sections
from lockstep.observe.analysis import PHASES, step_times
from lockstep.observe.records import LoaderUse
from lockstep.observe.summary import Evaluations, Late, late_rank, summary
from lockstep.observe.trace_files import read_folder
from lockstep.observe.words import in_words
from tests.observe.traced import MS, Slow, rank_of, train_slowly, two_ranks

PLACES = ("data", "forward", "backward", "collectives")


def check_named(folder: Path, place: str, num_ranks: int, rank: int, seconds: float) -> None:
    slow = Slow(place, rank, seconds)
    lockstep.launch(train_slowly, num_ranks, (folder, slow), ranks="threads")
    ranks = read_folder(folder)
    steps = step_times(ranks)
    late = late_rank(steps)
    assert late is not None
    assert (late.rank, late.phase) == (rank, place)
    assert f"wait for rank {rank} " in in_words(summary(ranks, steps))


@pytest.mark.parametrize("place", PLACES)
def test_a_rank_that_is_slow_is_named(tmp_path: Path, place: str) -> None:
    check_named(tmp_path, place, 3, 1, 0.06)


@pytest.mark.long
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize(
    ("rank", "seconds"), [(0, 0.05), (0, 0.1), (1, 0.05), (1, 0.08), (-1, 0.2)]
)
def test_a_slow_rank_is_named_in_60_cases(
    tmp_path: Path, place: str, num_ranks: int, rank: int, seconds: float
) -> None:
    check_named(tmp_path, place, num_ranks, rank % num_ranks, seconds)


def train_sharded(world: lockstep.World, folder: Path) -> None:
    model = lockstep.parallelize(nn.Linear(8, 8))
    optimizer = lockstep.shard_optimizer(torch.optim.SGD(model.parameters(), lr=1e-6))
    with lockstep.trace(folder):
        for _ in range(5):
            loss = lockstep.mean(model(torch.ones(2, 8)).square())
            loss.backward()
            if world.rank == 1:
                time.sleep(0.2)  # longer than other programs take the cores
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.forks
def test_a_rank_that_is_late_at_a_sharded_optimizers_step_is_named(tmp_path: Path) -> None:
    lockstep.launch(train_sharded, 2, (tmp_path,))
    ranks = read_folder(tmp_path)
    late = late_rank(step_times(ranks))
    assert late is not None
    # Between backward and step there is only the program's own code.
    assert (late.rank, late.phase) == (1, "other")
    assert "wait for rank 1 " in in_words(summary(ranks, step_times(ranks)))


def test_times_are_added_up_exactly() -> None:
    # Step 1 begins at 11; rank 1 comes 4 ms later, and its sum takes 1 ms.
    ranks = [rank_of(0, [5, 15], [10, 20]), rank_of(1, [9, 19], [10, 20])]
    early, late = step_times(ranks)[1]
    assert early.phases == {
        **dict.fromkeys(PHASES, 0),
        "data": MS,
        "forward": MS,
        "backward": 2 * MS,
        "optimizer": MS,
    }
    assert early.waits_for == {1: 4 * MS}
    assert (early.transfer, early.hidden, early.total) == (MS, MS, 10 * MS)
    assert late.waits_for == {1: 0}
    assert late.phases["backward"] == 6 * MS
    found = late_rank(step_times(ranks))
    assert found is not None
    assert (found.rank, found.phase) == (1, "backward")
    assert found.part == pytest.approx(0.4, abs=0.03)


def test_ranks_are_named_by_their_numbers_in_a_trace_that_lacks_some() -> None:
    whole = [rank_of(0, [5, 15], [11, 21]), rank_of(1, [9, 19], [11, 21])]
    part = [found._replace(rank=found.rank + 3) for found in whole]
    assert step_times(part)[1][0].waits_for == {4: 4 * MS}
    late = late_rank(step_times(part))
    assert late == late_rank(step_times(whole))._replace(rank=4)  # type: ignore[union-attr]
    found = sections.waiting(step_times(part))
    assert found is not None
    assert found.columns == ("rank", "for rank 4")


@given(waits=st.lists(st.lists(st.integers(0, 50), min_size=3, max_size=3), min_size=2, max_size=6))
def test_every_nanosecond_is_counted_once(waits: list[list[int]]) -> None:
    now, comes, leaves = 0, [[], [], []], []  # type: ignore[var-annotated]
    for delays in waits:
        for rank, delay in enumerate(delays):
            comes[rank].append(now + 3 + delay)
        now += 3 + max(delays) + 2
        leaves.append(now)
        now += 1
    ranks = [rank_of(rank, comes[rank], leaves) for rank in range(3)]
    for together in step_times(ranks):
        for times in together:
            assert sum(times.phases.values()) + times.waiting + times.transfer == times.total
            assert times.transfer == 2 * MS
            assert all(value >= 0 for value in times.phases.values())


def test_the_first_of_several_steps_does_not_count() -> None:
    # It takes 51 ms, in which nearly nothing is sent, and the others 10 ms.
    comes, leaves = [49, 55, 65, 75], [50, 60, 70, 80]
    ranks = [rank_of(rank, comes, leaves) for rank in range(2)]
    found = summary(ranks, step_times(ranks))
    assert found.num_steps == 4
    assert found.spread == (0.01, 0.01)
    assert found.transfer == 0.5


def words_of(**changes: Any) -> str:
    ranks = [rank_of(0, [5, 15], [10, 20]), rank_of(1, [5, 15], [10, 20])]
    found = summary(ranks, step_times(ranks))._replace(late=None, waiting=0, transfer=0)
    changes["phases"] = {**dict.fromkeys(PHASES, 0.0), **changes.get("phases", {})}
    return in_words(found._replace(**changes))


def test_it_says_what_holds_a_run_back() -> None:
    assert "the ranks wait for data" in words_of(phases={"data": 0.3})
    assert "now for one and now for another" in words_of(waiting=0.3)
    assert "now for one and" in words_of(waiting=0.3, num_ranks_of_host=4, num_cores=4)
    assert "8 ranks share 2 cores" in words_of(waiting=0.3, num_ranks_of_host=8, num_cores=2)
    assert "lockstep.accumulate" in words_of(transfer=0.3, of_gradients=0.2)
    assert "shard_optimizer" in words_of(transfer=0.3, of_gradients=0.2)
    assert "shard_optimizer" not in words_of(transfer=0.3, of_gradients=0.2, is_sharded=True)
    assert "sending gradients" not in words_of(transfer=0.3, of_gradients=0.1)
    unmatched = words_of(transfer=0.3, of_gradients=0.2, num_unmatched=2)
    assert "waited in different operations" in unmatched
    assert "sending gradients" not in unmatched
    assert "outside of loader" in words_of(phases={"other": 0.3})
    # Two steps of 10.5 ms.
    evaluates = words_of(evaluations=Evaluations(1, 0.009, 0.0, None))
    assert "Besides the steps a rank evaluates for 9.00 ms, 30% of the time" in evaluates
    awaits = words_of(evaluations=Evaluations(1, 0.0, 0.009, 1))
    assert "a rank waits for 9.00 ms while another one evaluates, mostly rank 1" in awaits
    assert "evaluate" not in words_of(evaluations=Evaluations(1, 0.001, 0.001, 1))
    assert "90% of the time is spent in forward" in words_of(phases={"backward": 0.9})


def of_loader(**changes: Any) -> str:
    use = LoaderUse(0, "Digits", 2, False, True, 4, 4.0, 400, 40.0)._replace(**changes)
    return words_of(phases={"data": 0.3}, loader=use, num_ranks_of_host=2, num_cores=8)


def test_advice_about_data_is_about_the_loader_that_there_is() -> None:
    assert "Digits has no workers: give it some (num_workers)" in of_loader(workers=0)
    has_workers = of_loader()
    assert "Digits has 2 workers on each rank: give it more" in has_workers
    assert "num_workers" not in has_workers
    # 4 batches of 420 take ten times as long as the others.
    assert "persistent_workers" not in has_workers
    slow = {"num_firsts": 40, "firsts": 40.0}
    assert "takes 1.00 s, and another one 100 ms: persistent_workers=True" in of_loader(**slow)
    assert "persistent_workers" not in of_loader(**slow, persistent=True)
    assert "persistent_workers" not in of_loader(**slow, workers=0)
    use = LoaderUse(0, "Digits", 2, True, True, 0, 0.0, 400, 40.0)
    shared = words_of(phases={"data": 0.3}, loader=use, num_ranks_of_host=2, num_cores=2)
    assert "2 ranks and 4 workers share 2 cores" in shared
    assert "give it" not in shared


def test_a_phase_is_blamed_only_if_it_takes_as_much_longer() -> None:
    late = Late(1, "backward", 0.3, seconds=0.010, excess=0.004, waited=0.005)
    assert "10.0 ms of a step in the backward, 4.00 ms more" in words_of(late=late)
    unclear = words_of(late=late._replace(excess=0.001))
    assert "wait for rank 1 for 30% of their time" in unclear
    assert "backward" not in unclear


def test_waits_in_different_operations_are_counted() -> None:
    ranks = two_ranks()
    spans = [s._replace(detail="reduce" * (s.name == "wait")) for s in ranks[1].spans]
    found = summary(ranks, step_times([ranks[0], ranks[1]._replace(spans=spans)]))
    assert found.num_unmatched == 2
    assert found.waiting == 0


def test_the_command_prints_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    lockstep.launch(train_slowly, 2, (tmp_path, Slow("data", 1, 0.05)), ranks="threads")
    (tmp_path / "trace.json").unlink()
    monkeypatch.setattr(sys, "argv", ["lockstep", "report", str(tmp_path)])
    cli.main()
    told = " ".join(capsys.readouterr().out.split())
    assert "wait for rank 1" in told
    assert "6 steps of 2 ranks" in told
    assert json.loads((tmp_path / "trace.json").read_text())
    assert (tmp_path / "report.html").exists()
    (tmp_path / "report.html").unlink()
    monkeypatch.setattr(sys, "argv", ["lockstep", "report", "--text", str(tmp_path)])
    cli.main()
    assert not (tmp_path / "report.html").exists()
    monkeypatch.setattr(sys, "argv", ["lockstep", "report", str(tmp_path / "none")])
    with pytest.raises(SystemExit):
        cli.main()
    assert "There is no trace in" in capsys.readouterr().err


def test_a_trace_without_a_whole_step_is_refused(tmp_path: Path) -> None:
    facts = '{"rank": 0, "host": "h"}\n'
    (tmp_path / "rank-0.spans").write_text(facts + "data 1 2 0 0  0\n")
    with pytest.raises(TraceError, match="no optimizer step"):
        step_times(read_folder(tmp_path))


def test_one_rank_is_never_late() -> None:
    ranks = [rank_of(0, [5, 15], [10, 20])]
    assert late_rank(step_times(ranks)) is None
