"""DataLoader refuses what would lose or repeat samples, and names it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist
from torch.utils.data import BatchSampler, DistributedSampler, SubsetRandomSampler

import lockstep
from lockstep.errors import SplitError
from tests.data.datasets import Augmented, Halves, Stream
from tests.data.numbers import Numbers
from tests.ranks import run_ranks


def test_what_cannot_be_emptied_is_named() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        each = lockstep.DataLoader(
            Numbers(5), 4, process_group=group, collate_fn=lambda samples: {"n": len(samples)}
        )
        if rank < 1:
            list(each)
            return
        with pytest.raises(SplitError, match="has a int in it"):
            list(each)

    run_ranks(2, body)


def test_a_sampler_that_gives_an_index_twice_is_refused() -> None:
    with pytest.raises(SplitError, match="gave 2 twice in epoch 0"):
        list(lockstep.DataLoader(Numbers(3), 4, sampler=[0, 1, 2, 2]))
    with pytest.raises(SplitError, match="twice"):
        list(lockstep.DataLoader(Numbers(3), 2, sampler=[0, 1, 2, 1]))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"seed": 1}, "seed is .* Give the same seed"),
        ({"batch_size": 6}, "batch_size is .* Make the same loader"),
        ({"shares": [2, 1]}, "shares is .* Make the same loader"),
        ({"dataset": Numbers(11)}, "length of the dataset is .* the whole dataset"),
        ({"sampler": range(9, -1, -1)}, "samplers is .* Make the same loader"),
    ],
)
def test_ranks_that_differ_are_named(options: dict[str, Any], named: str) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        local: dict[str, Any] = {"dataset": Numbers(10), "batch_size": 4, "seed": 0}
        local |= options if rank else {}
        each = lockstep.DataLoader(process_group=group, **local)
        with pytest.raises(SplitError, match=named) as caught:
            iter(each)
        assert " on rank 1 and " in str(caught.value)

    run_ranks(2, body)


def test_a_sampler_of_a_ranks_samples_is_told_to_give_all() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        mine = range(rank, 10, 2)
        batches = BatchSampler(SubsetRandomSampler(mine), 2, drop_last=False)
        for arguments in ({"sampler": mine, "batch_size": 4}, {"batch_sampler": batches}):
            each = lockstep.DataLoader(Numbers(10), process_group=group, **arguments)  # type: ignore[arg-type]
            with pytest.raises(SplitError, match=r"order of samples .* all samples on every rank"):
                iter(each)

    run_ranks(2, body)


def test_shares_of_other_numbers_of_ranks_are_those_of_one() -> None:
    """A script's shares don't keep it from a run on one rank."""
    for shares in ([3, 1], [0, 2, 5], [7]):
        each = lockstep.DataLoader(Numbers(6), 4, shares=shares)
        assert [len(batch) for batch in each] == [4, 2]
    for wrong in ([], [0, 0], [3, -1]):
        with pytest.raises(SplitError, match="shares is"):
            lockstep.DataLoader(Numbers(6), 4, shares=wrong)


def test_ranks_in_different_epochs_are_named() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        each = lockstep.DataLoader(Numbers(10), 4, process_group=group)
        each.set_epoch(rank)
        with pytest.raises(SplitError, match="epoch is 1 on rank 1 and 0 on rank 0"):
            iter(each)

    run_ranks(2, body)


def test_a_dataset_of_another_length_is_refused() -> None:
    dataset = Numbers(10)
    each = lockstep.DataLoader(dataset, 4)
    list(each)
    dataset.length = 12
    with pytest.raises(SplitError, match="had 10 samples in an earlier epoch, and has 12 now"):
        iter(each)


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (lambda: lockstep.DataLoader(Numbers(11), 4), "length of the dataset was 10"),
        (lambda: lockstep.DataLoader(Numbers(10), 5), "batch_size was 4"),
        (lambda: lockstep.DataLoader(Numbers(10), 4, shuffle=True), "samplers was"),
        (lambda: lockstep.DataLoader(Augmented(10), 4), "dataset was 'Numbers'"),
    ],
)
def test_the_state_of_another_loader_is_refused(other: Callable[[], Any], named: str) -> None:
    each = lockstep.DataLoader(Numbers(10), 4)
    next(iter(each))
    loading = other()
    before = loading.state_dict()
    with pytest.raises(ValueError, match=named):
        loading.load_state_dict(each.state_dict())
    with pytest.raises(ValueError, match="version 2"):
        each.load_state_dict(each.state_dict() | {"version": 2})
    with pytest.raises(ValueError, match="state_dict"):
        each.load_state_dict({"epoch": 1})
    assert loading.state_dict() == before


def test_a_sampler_that_cannot_be_repeated_is_refused_when_it_goes_on() -> None:
    class Own(Halves):
        def __init__(self, length: int, seed: int) -> None:
            super().__init__(length)
            self.random = random.Random(seed)

        def __iter__(self) -> Iterator[int]:
            yield from self.random.sample(range(self.length), self.length)

    each = lockstep.DataLoader(Numbers(20), 4, sampler=Own(20, 0))
    next(iter(each))
    again = lockstep.DataLoader(Numbers(20), 4, sampler=Own(20, 1))
    again.load_state_dict(each.state_dict())
    with pytest.raises(SplitError, match="doesn't give the same indices again"):
        list(again)


def test_bad_arguments_are_refused() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        with pytest.raises(SplitError, match="global batch of 1 can't be split over 2 ranks"):
            lockstep.DataLoader(Numbers(10), 1, process_group=group)
        sampler = DistributedSampler(Numbers(10), 2, rank)
        with pytest.raises(SplitError, match="DistributedSampler gives each rank samples"):
            lockstep.DataLoader(Numbers(10), 4, sampler=sampler, process_group=group)
        for shares in ([1], [0, 0], [1, -1]):
            with pytest.raises(SplitError, match="2 whole numbers"):
                lockstep.DataLoader(Numbers(10), 4, shares=shares, process_group=group)
        for wrong in ("fast", 3, [0.5, 0.5]):
            with pytest.raises(TypeError, match="shares"):
                lockstep.DataLoader(Numbers(10), 4, shares=wrong, process_group=group)

    run_ranks(2, body)


def test_an_iterable_dataset_that_gives_all_to_each_is_named() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        each = lockstep.DataLoader(Stream(9, divides=False), 4, process_group=group)
        with pytest.raises(SplitError, match="same samples to rank 0 and to rank 1"):
            list(each)

    run_ranks(2, body)
    with pytest.raises(SplitError, match="worker 0 of rank 0 and to worker 1 of rank 0"):
        list(lockstep.DataLoader(Stream(9, divides=False), 4, num_workers=2))
