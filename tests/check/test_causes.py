"""What a check concludes from records, without running a program."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lockstep
from lockstep.check.batches import Part, global_batch, hashes_of_rows, repeated
from lockstep.check.causes import Evidence, known, mistake, suspects
from lockstep.check.command import CheckFinding, _of_division
from lockstep.check.compare import Comparison, Parting, Runs, compare
from lockstep.check.locate import RowSums, first_difference
from lockstep.check.recorder import DividedBackward
from lockstep.check.records import (
    ALONE,
    ROUNDED,
    Backward,
    BatchRecord,
    CollatedSamples,
    Records,
    Step,
)
from lockstep.check.trials import Suspect
from lockstep.data import of_batch
from lockstep.errors import LockstepError


def step(value: float = 1.0, **facts: Any) -> Step:
    usual: dict[str, Any] = {
        "tensors": {"w": torch.tensor([value])},
        "gradients": {"w": torch.tensor([value])},
        "start": {},
        "trained": ["w"],
        "parallel": ["w"],
        "backwards": [Backward(0.0, 4, 1)],
        "options": {"lr": 0.1},
        "changed": [],
        "inputs": 1,
        "draws": False,
        "accumulates": False,
        "eps": 1e-7,
    }
    return Step(**(usual | facts))


def evidence(one: Step, other: Step, alone: Step | None = None, **more: Any) -> Evidence:
    """Of a difference between ranks or, if ``alone`` is given, from one process."""
    parting = Parting("w", 1.0, 0.0, 1 if alone is None else None, 2)
    sites = more.pop("sites", {})
    return Evidence(parting._replace(**more), [one, other], alone or one, sites)


def compared(tmp_path: Path, *runs: list[Step], joins: bool = False) -> Comparison:
    """The comparison of two ranks with one process, by the steps of each."""
    names = ("rank-0", "rank-1", ALONE, ROUNDED)
    records = [Records(str(tmp_path), name) for name in names]
    for each, steps in zip(records, [*runs, runs[2]], strict=True):
        for number, one in enumerate(steps, start=1):
            each.save(f"step-{number}", one)
    return compare(Runs(records[:2], records[2], records[2], records[3], joins))


def of(count: int, inputs: int = 1) -> Step:
    return step(backwards=[Backward(0.0, count, 1)], inputs=inputs)


@pytest.mark.parametrize(
    ("counts", "is_even"),
    [
        ([[2, 2], [2, 2]], True),
        ([[3, 2], [1, 2]], False),
        ([[2, 3], [2, 1]], False),
    ],
    ids=["even", "uneven at first", "uneven at last"],
)
def test_samples_are_even_if_they_are_in_each_step(
    tmp_path: Path, counts: list[list[int]], is_even: bool
) -> None:
    first, other = ([of(n, rank) for n in each] for rank, each in enumerate(counts, start=1))
    found = compared(tmp_path, first, other, [of(4), of(4)])
    assert (found.num_steps, found.parting, found.are_even) == (2, None, is_even)
    assert not found.are_same


def test_samples_are_the_same_if_all_inputs_are(tmp_path: Path) -> None:
    assert compared(tmp_path, [of(2)], [of(2)], [of(4)]).are_same


def test_ranks_that_differ_from_each_other_are_told_first(tmp_path: Path) -> None:
    found = compared(tmp_path, [step(), step()], [step(), step(2.0)], [step(), step(5.0)])
    assert found.parting is not None
    assert (found.parting.rank, found.parting.number, found.parting.name) == (1, 2, "w")
    both = compared(tmp_path / "other", [step()], [step()], [step(2.0)])
    assert both.parting is not None
    assert both.parting.rank is None


def test_steps_that_one_rank_takes_alone_are_compared_under_join(tmp_path: Path) -> None:
    runs = [step(), step(3.0)], [step()], [step(), step(2.0)]
    assert compared(tmp_path / "one", *runs).parting is None
    found = compared(tmp_path / "other", *runs, joins=True)
    assert found.parting is not None
    assert found.parting.number == 2


def test_weights_that_are_evaluated_are_compared(tmp_path: Path) -> None:
    for name, value in (("rank-0", 1.0), ("rank-1", 2.0), (ALONE, 1.0), (ROUNDED, 1.0)):
        Records(str(tmp_path), name).save("evaluation-1", {"w": torch.tensor([value])})
    found = compared(tmp_path, [step()], [step()], [step()])
    assert found.parting is not None
    assert found.parting.in_evaluation
    one = evidence(step(), step(), in_evaluation=True)
    assert "right after the step 'w' is alike" in known(one)[0]


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (evidence(step(), step(options={"lr": 0.3})), Suspect.OPTIONS),
        (
            evidence(step(start={"w": torch.ones(1)}), step(start={"w": torch.zeros(1)})),
            Suspect.START,
        ),
        (evidence(step(), step(changed=["w"])), Suspect.CHANGES),
        (evidence(step(), step(2.0)), Suspect.AVERAGE),
        (evidence(step(), step(), sites={"no_sync": ["no_sync"]}), Suspect.SYNC),
        (evidence(step(), step(), step(options={"lr": 0.3})), Suspect.OPTIONS),
        (evidence(step(), of(3), step()), Suspect.ROWS),
        (evidence(step(), step(draws=True), step()), Suspect.DRAWS),
        (evidence(step(), step(), step(), sites={"BatchNorm": ["a"]}), Suspect.BATCH_NORM),
        (evidence(step(), step(), step()), Suspect.WORLD_SIZE),
    ],
)
def test_what_is_known_gives_reason_for_suspects(found: Evidence, expected: Suspect) -> None:
    assert expected in suspects(found)
    same = evidence(step(), step(), None if found.parting.rank else step())
    assert expected == Suspect.WORLD_SIZE or expected not in suspects(same)
    assert mistake(expected, found).cause


def test_gradients_that_are_not_averaged() -> None:
    for parallel, words in (([], "isn't parallel"), (["v"], "outside"), (["w"], "each rank's own")):
        found = evidence(step(parallel=parallel), step(2.0))
        assert words in mistake(Suspect.AVERAGE, found).cause


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (evidence(step(), step(trained=["v"])), "has other parameters"),
        (evidence(step(trained=[]), step()), "no optimizer trains"),
        (evidence(step(), step()), "the same gradient of 'w', and update it in different ways"),
        (evidence(step(), step(2.0)), "different gradients"),
        (evidence(step(2.0), step(2.0), step()), "2 times those of one process"),
        (evidence(step(), step(), of(9)), "8 rows on all ranks together, and 9 in one process"),
    ],
)
def test_what_is_known_without_a_cause(found: Evidence, words: str) -> None:
    assert any(words in each for each in known(found))


def batch_of(rows: list[int], *, content: str = "a", num_backwards: int = 0) -> BatchRecord:
    return BatchRecord(rows, False, False, False, (), content, num_backwards)


def part(samples: list[Any], collate: Any, *, draws: bool = False) -> Part:
    value = collate(samples)
    batch = batch_of(hashes_of_rows(value), content=of_batch(value))
    written = io.BytesIO()
    torch.save(samples, written)
    return Part(batch, value, CollatedSamples(written.getvalue(), draws))


def padded(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)


def test_a_global_batch_is_made_of_samples() -> None:
    parts = [part([torch.ones(n)], padded) for n in (1, 3)]
    assert global_batch(padded, parts).tolist() == [[1, 0, 0], [1, 1, 1]]
    with pytest.raises(LockstepError, match="can't be joined"):
        global_batch(None, parts)
    with pytest.raises(LockstepError, match="random numbers"):
        global_batch(padded, [part([torch.ones(n)], padded, draws=True) for n in (1, 3)])


def test_parts_without_samples_are_left_out() -> None:
    full = Part(batch_of([1]), [torch.ones(1, 6), torch.ones(1)], None)
    without = BatchRecord([], False, True, False, (), "b", 0)
    empty = Part(without, [torch.ones(0, 6), torch.ones(0)], None)
    x, y = global_batch(None, [full, empty])
    assert (x.shape, y.shape) == ((1, 6), (1,))


def test_a_batch_that_all_ranks_have_is_one() -> None:
    parts = [part([torch.ones(2)], padded)] * 2
    assert global_batch(padded, parts).tolist() == [[1, 1]]


def test_a_checksum_is_of_all_that_is_in_a_batch() -> None:
    class Made:
        def __init__(self, value: object) -> None:
            self.value = value

    values = [
        *({"x": torch.zeros(2)}, {"x": torch.ones(2)}, {"y": torch.ones(2)}, [1, "a"], [1, "b"]),
        *(torch.ones(2, dtype=torch.float64), torch.ones(2, 1), Made(1), Made([2]), (1, 2), [1, 2]),
    ]
    assert len({of_batch(value) for value in values}) == len(values)
    assert of_batch([1, (n for n in range(3))]) == ""


def test_equal_batches_have_one_checksum_whichever_objects_are_in_them() -> None:
    def make(text: str) -> list[Any]:
        return [text, np.array([[text], [1, 2]], dtype=object)]

    assert of_batch(make("one")) == of_batch(make("".join(["o", "ne"]))) != ""
    circle: list[Any] = [torch.ones(1)]
    circle.append(circle)
    assert of_batch(circle) != ""


def test_samples_of_several_ranks_are_told(tmp_path: Path) -> None:
    def save(folder: str, *rows: list[int], num_backwards: int = 1) -> list[Records]:
        ranks = [Records(str(tmp_path / folder), f"rank-{rank}") for rank in range(2)]
        for records, indices in zip(ranks, rows, strict=True):
            for number, row in enumerate(indices):
                batch = batch_of([row], num_backwards=number * num_backwards)
                records.save(f"batch-0-1-{number}", batch)
        return ranks

    assert repeated(save("divided", [1, 2], [3, 4])) is None
    assert repeated(save("drawn so", [1, 1], [1, 4])) is None
    assert repeated(save("evaluated", [1, 2], [2, 3], num_backwards=0)) is None
    found = repeated(save("overlapping", [1, 2], [2, 3]))
    assert found is not None
    assert "1 of the 4 samples" in found.where


def test_the_first_value_that_differs() -> None:
    def values(*sums: float, size: int = 1) -> list[RowSums]:
        return [RowSums(f"value {n}", (each, each), size) for n, each in enumerate(sums)]

    alone = values(2.0, 4.0, size=2)
    assert first_difference([values(1.0, 2.0)] * 2, alone, 0) == (None, True)
    assert first_difference([values(1.0, 2.0), values(1.0, 3.0)], alone, 0) == ("value 1", True)
    assert first_difference([values(1.0)] * 2, alone, 0) == (None, False)
    padded_otherwise = [values(1.0, 2.0), values(5.0, 2.0, size=3)]
    assert first_difference(padded_otherwise, values(2.0, 4.0, size=7), 0) == (None, True)


@pytest.mark.parametrize(
    ("divide", "divisor"),
    [
        (lambda loss: loss / 4, 4),
        (lambda loss: loss * 0.25, 4),
        (lambda loss: loss / torch.tensor(4.0), 4),
        (lambda loss: 0.5 * loss, 1),
        (lambda loss: loss + 1, 1),
        (lambda loss: loss / (loss + 1), 1),
        (lambda loss: loss, 1),
    ],
)
def test_a_division_of_the_mean_is_seen(divide: Any, divisor: float) -> None:
    losses = torch.ones(3, requires_grad=True)
    loss = divide(lockstep.mean(losses))
    with DividedBackward([loss]) as division:
        loss.backward()
    assert division.divisor == divisor
    loss = losses.mean() / 4
    with DividedBackward([loss]) as division:
        loss.backward()
    assert division.divisor == 1


@pytest.mark.parametrize("divisors", [[2.0, 2.0], [2.0, 1.0], [2.0]])
def test_a_division_by_the_number_of_micro_batches(tmp_path: Path, divisors: list[float]) -> None:
    records = Records(str(tmp_path), "rank-0")
    backwards = [Backward(0.0, 4, 1, divisor) for divisor in divisors]
    records.save("step-1", step(backwards=backwards, accumulates=True))
    found: CheckFinding | None = _of_division([records])
    assert (found is not None) == (divisors == [2.0, 2.0])
