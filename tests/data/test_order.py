"""Orders of epochs: permutations, torch's where they are kept, and no list of all samples."""

from __future__ import annotations

import itertools
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Sampler

import lockstep
from lockstep.data import loader as loader_module
from lockstep.data import order as order_module
from lockstep.data.order import Order
from lockstep.errors import SplitError
from tests.data.numbers import Numbers
from tests.ranks import run_ranks


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let orders be computed from the second sample on."""
    for module in (order_module, loader_module):
        monkeypatch.setattr(module, "MAX_KEPT", 1)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@given(length=st.integers(2, 400), seed=st.integers(0, 2**32))
def test_a_computed_order_has_each_number_once(length: int, seed: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(order_module, "MAX_KEPT", 1)
        order = Order(length, seeded(seed))
    assert order[:].sort().values.tolist() == [*range(length)]
    assert [number for place in range(length) for number in order[place : place + 1].tolist()] == (
        order[:].tolist()
    )


@pytest.mark.long
def test_each_order_is_computed_as_often(computed: None) -> None:
    # Of the 24 orders of four numbers, each is to come as often. The bound is that of chi-square
    # with 23 degrees of freedom at a chance of 1e-6.
    found = Counter(tuple(Order(4, seeded(seed))[:].tolist()) for seed in range(4800))
    assert sum((found[each] - 200) ** 2 / 200 for each in itertools.permutations(range(4))) < 69


@pytest.mark.long
def test_computed_orders_are_spread_evenly(computed: None) -> None:
    # Numbers next to each other come from anywhere: no correlation with the place, or each other.
    numbers = Order(200_000, seeded(1))[:].double()
    places = torch.arange(200_000).double()
    for left, right in ((numbers, places), (numbers[1:], numbers[:-1])):
        assert abs(torch.corrcoef(torch.stack([left, right]))[0, 1]) < 5 / 200_000**0.5


def test_a_shuffle_that_is_kept_is_torchs() -> None:
    order = Order(1000, seeded(3))
    assert order[:].equal(torch.randperm(1000, generator=seeded(3)))


@pytest.mark.parametrize("shuffle", [False, True])
def test_an_epoch_of_a_million_million_begins_and_goes_on(shuffle: bool) -> None:
    # A list of its samples, or of its batches, would not fit into any memory.
    def make() -> Any:
        return lockstep.DataLoader(Numbers(10**12), 8, shuffle=shuffle, seed=5)

    state = make().state_dict() | {"epoch": 2, "num_batches": 10**11, "digest": 7}
    first, later = make(), make()
    later.load_state_dict(state)
    assert len({number for batch in itertools.islice(first, 100) for number in batch.tolist()}) == (
        800
    )
    batches = iter(later)
    wanted = next(batches)
    if not shuffle:
        assert wanted.tolist() == [*range(8 * 10**11, 8 * 10**11 + 8)]
    again = make()
    again.load_state_dict(later.state_dict())
    assert next(iter(again)).tolist() == next(batches).tolist()


@pytest.mark.parametrize("options", [{}, {"shuffle": True}, {"drop_last": True, "shuffle": True}])
def test_computed_batches_are_shared_and_go_on(computed: None, options: dict[str, Any]) -> None:
    def epoch(rank: int, group: dist.ProcessGroup, stop: int = 0) -> list[list[int]]:
        loader: Any = lockstep.DataLoader(Numbers(29), 4, process_group=group, seed=3, **options)
        found = [batch.tolist() for batch in itertools.islice(loader, stop)] if stop else []
        again: Any = lockstep.DataLoader(Numbers(29), 4, process_group=group, seed=3, **options)
        again.load_state_dict(loader.state_dict())
        return found + [batch.tolist() for batch in again]

    (whole,) = run_ranks(1, epoch)
    samples = [number for batch in whole for number in batch]
    assert (len(samples), len({*samples})) == ((28, 28) if "drop_last" in options else (29, 29))
    for stop in (1, 5, 7):
        parts = zip(*run_ranks(2, lambda *each, stop=stop: epoch(*each, stop)), strict=True)
        assert [[*itertools.chain(*part)] for part in parts] == whole


def test_a_state_of_another_way_of_shuffling_is_refused(computed: None) -> None:
    loader = lockstep.DataLoader(Numbers(12), 4, shuffle=True, seed=3)
    next(iter(loader))
    state = loader.state_dict()
    del state["facts"]["way of shuffling"]  # as of a release that kept the permutation
    with pytest.raises(ValueError, match="way of shuffling was None, and this one's is 'computed'"):
        loader.load_state_dict(state)


class Counting(Sampler[int]):
    """A sampler of a user's, which gives the last number twice if it is told to."""

    def __init__(self, length: int, *, repeats: bool = False) -> None:
        self.length, self.repeats = length, repeats

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        yield from range(self.length - 1)
        yield 0 if self.repeats else self.length - 1


@pytest.mark.long
def test_what_a_sampler_gave_is_noted_in_little_memory() -> None:
    num_samples, dataset = 100_000, Numbers(10**12)
    loader = lockstep.DataLoader(dataset, 100, sampler=Counting(num_samples))
    batches = iter(loader)
    next(batches)
    tracemalloc.start()
    try:
        for _ in itertools.islice(batches, 900):
            pass
        grown, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert grown < 10 * num_samples  # a set of them has 80 and more each


def test_an_index_that_comes_twice_far_apart_is_refused() -> None:
    loader = lockstep.DataLoader(Numbers(5000), 100, sampler=Counting(5000, repeats=True))
    with pytest.raises(SplitError, match="gave 0 twice in epoch 0"):
        list(loader)


def test_the_distributed_sampler_takes_little_memory() -> None:
    sampler = lockstep.DistributedSampler(Numbers(10**12), 4, 1, shuffle=False)
    assert [*itertools.islice(sampler, 3)] == [1, 5, 9]
    tracemalloc.start()
    try:
        shuffled = iter(lockstep.DistributedSampler(Numbers(1_000_000), 2, 1))
        next(shuffled)
        _, peak = tracemalloc.get_traced_memory()  # of Python's numbers; tensors aren't counted
    finally:
        tracemalloc.stop()
    assert peak < 4_000_000
