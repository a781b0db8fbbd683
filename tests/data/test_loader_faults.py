"""DataLoader where a program does unusual things: no sample is lost or counted twice."""

from __future__ import annotations

import copy
import itertools
import random
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset, Sampler, get_worker_info

import lockstep
from lockstep.errors import SplitError
from tests.data.numbers import Numbers
from tests.ranks import run_ranks


class SlowBegin(Numbers):
    def __getitem__(self, index: int) -> Any:
        if index < 4:
            time.sleep(0.2)
        return index


class DrawsByChance(Numbers):
    """Draws from the second generator only where the first gives a small number."""

    def __getitem__(self, index: int) -> Any:
        return random.random() if torch.rand(()) < 0.5 else 0.0


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for number in range(first, 24, step):
            time.sleep(0.0005)  # other ranks run
            yield number


class Given(Sampler[Any]):
    def __init__(self, indices: Any) -> None:
        self.indices = indices

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.indices)


def all_of(batches: Any) -> list[int]:
    return [number for batch in batches for number in batch.tolist()]


def test_a_state_before_the_first_batch_is_of_that_epoch() -> None:
    loader = lockstep.DataLoader(Numbers(10), 4, seed=1, shuffle=True)
    begun = iter(loader)
    state = loader.state_dict()
    again = lockstep.DataLoader(Numbers(10), 4, seed=1, shuffle=True)
    again.load_state_dict(state)
    assert all_of(again) == all_of(begun)


def test_a_state_is_exact_if_batches_may_come_out_of_order() -> None:
    loader = lockstep.DataLoader(SlowBegin(16), 4, num_workers=2, in_order=False)
    begun = iter(loader)
    seen = next(begun).tolist()
    again = lockstep.DataLoader(SlowBegin(16), 4)
    again.load_state_dict(loader.state_dict())
    assert seen + all_of(again) == list(range(16))


def test_a_state_can_be_loaded_while_an_iterator_runs() -> None:
    loader = lockstep.DataLoader(Numbers(20), 4, seed=1, shuffle=True)
    begun = iter(loader)
    first = next(begun).tolist()
    state = loader.state_dict()
    next(begun)
    loader.load_state_dict(state)
    next(begun)
    assert loader.state_dict() == state
    assert sorted(first + all_of(loader)) == list(range(20))


def test_the_state_is_that_of_the_last_iterator() -> None:
    loader = lockstep.DataLoader(Numbers(20), 4)
    earlier, later = iter(loader), iter(loader)
    next(later)
    list(earlier)
    state = loader.state_dict()
    assert (state["epoch"], state["num_batches"]) == (1, 1)


@pytest.mark.parametrize(
    ("changes", "error", "named"),
    [
        ({"seed": "x"}, TypeError, "seed is 'x'"),
        ({"epoch": -1}, ValueError, "epoch is -1"),
        ({"num_batches": 1.5}, TypeError, "num_batches is 1.5"),
        ({"facts": None}, TypeError, "facts is None"),
    ],
)
def test_a_damaged_state_is_refused(
    changes: dict[str, Any], error: type[Exception], named: str
) -> None:
    loader = lockstep.DataLoader(Numbers(10), 4, seed=1)
    state = loader.state_dict()
    with pytest.raises(error, match=named):
        loader.load_state_dict(state | changes)
    assert loader.state_dict() == state


def test_a_state_of_another_dataset_is_refused_between_epochs() -> None:
    loader = lockstep.DataLoader(Numbers(10), 4)
    list(loader)
    with pytest.raises(ValueError, match="length of the dataset was 10, and this one's is 11"):
        lockstep.DataLoader(Numbers(11), 4).load_state_dict(loader.state_dict())
    lockstep.DataLoader(Numbers(10), 5).load_state_dict(loader.state_dict())


def test_a_state_of_more_batches_than_there_are_is_refused() -> None:
    loader = lockstep.DataLoader(Numbers(10), 4)
    next(iter(loader))
    loader.load_state_dict(loader.state_dict() | {"num_batches": 9})
    with pytest.raises(SplitError, match="counts 9 batches of epoch 0, and the sampler gives 3"):
        list(loader)


def test_numbers_of_all_generators_repeat_that_a_sample_draws_by_chance() -> None:
    found = set()
    for before in range(20):  # the program's own numbers, with which samples are first read
        torch.manual_seed(before)
        loader = lockstep.DataLoader(DrawsByChance(6), 1, seed=2)
        found.add(tuple(float(batch) for batch in loader))
    assert len(found) == 1


def test_the_program_keeps_its_own_numbers_of_random() -> None:
    for dataset in (Numbers(8), DrawsByChance(8)):
        loader = lockstep.DataLoader(dataset, 4, seed=5)
        random.seed(1)
        random.gauss(0, 1)
        expected = random.gauss(0, 1), random.random()
        random.seed(1)
        random.gauss(0, 1)
        list(loader)
        assert (random.gauss(0, 1), random.random()) == expected


def test_the_program_keeps_its_own_numbers_of_numpy() -> None:
    """Also the second of a pair that normal() has drawn."""
    loader = lockstep.DataLoader(Numbers(8), 4, collate_fn=lambda _: np.random.normal(size=3))
    for _ in range(2):
        np.random.seed(1)
        np.random.normal()
        expected = np.random.normal(), np.random.normal()
        np.random.seed(1)
        np.random.normal()
        list(loader)
        assert (np.random.normal(), np.random.normal()) == expected


def test_a_repeated_index_is_named_wherever_it_is() -> None:
    for indices in ([0, 1, 2, 1], torch.tensor([0, 1, 2, 1])):
        for size in (2, 4):
            with pytest.raises(SplitError, match="gave 1 twice in epoch 0"):
                list(lockstep.DataLoader(Numbers(3), size, sampler=Given(indices)))


def test_orders_that_differ_later_in_an_epoch_are_named() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        indices = [*range(30), *(range(30, 40) if rank else range(39, 29, -1))]
        loader = lockstep.DataLoader(Numbers(40), 4, sampler=Given(indices), process_group=group)
        with pytest.raises(SplitError, match="order of samples is"):
            iter(loader)

    run_ranks(2, body)


def test_no_rank_waits_for_one_whose_dataset_has_changed() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        dataset = Numbers(10)
        loader = lockstep.DataLoader(dataset, 4, process_group=group)
        list(loader)
        dataset.length += rank
        with pytest.raises(SplitError, match="length of the dataset is 11 on rank 1 and 10 on"):
            iter(loader)

    run_ranks(2, body)


def test_measured_shares_need_equal_numbers_of_batches_read_ahead() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        loader = lockstep.DataLoader(
            Numbers(40), 4, shares="auto", num_workers=2 * rank, process_group=group
        )
        with pytest.raises(SplitError, match="number of batches read ahead is 5 on rank 1"):
            iter(loader)

    run_ranks(2, body)


def test_an_iterable_dataset_has_a_share_for_each_rank() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        with pytest.raises(SplitError, match="would be lost"):
            lockstep.DataLoader(Stream(), 4, shares=[9, 1], process_group=group)

    run_ranks(2, body)


def test_an_iterable_dataset_in_ranks_that_are_threads() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> list[int]:
        return all_of(lockstep.DataLoader(Stream(), 4, seed=1, process_group=group))

    for _ in range(10):
        assert sorted(itertools.chain(*run_ranks(4, body))) == list(range(24))


@pytest.mark.parametrize("size", [1, 2])
def test_a_loader_can_be_copied_after_an_epoch(size: int) -> None:
    def body(rank: int, group: dist.ProcessGroup | None) -> list[int]:
        loader = lockstep.DataLoader(Numbers(10), 4, seed=1, shares="auto", process_group=group)
        list(loader)
        return all_of(copy.deepcopy(loader))

    assert body(0, None) == list(range(10))
    assert sorted(itertools.chain(*run_ranks(size, body))) == list(range(10))


@pytest.mark.parametrize(
    ("collate", "empty"),
    [
        (lambda samples: list(zip(*samples, strict=True)), [(), ()]),  # images of several sizes
        (lambda samples: {"x": torch.stack([x for x, _ in samples], 1)}, {"x": (7, 0)}),
        (lambda samples: {"name": [n for _, n in samples]}, {"name": []}),
    ],
)
def test_an_empty_batch_has_no_samples_wherever_they_are(collate: Any, empty: Any) -> None:
    class Pairs(Numbers):
        def __getitem__(self, index: int) -> Any:
            return torch.ones(7), str(index)

    def body(rank: int, group: dist.ProcessGroup) -> Any:
        *_, last = lockstep.DataLoader(Pairs(3), 2, collate_fn=collate, process_group=group)
        return last

    last = run_ranks(2, body)[1]
    if "x" in last:
        last = {"x": tuple(last["x"].shape)}
    assert last == empty
