"""Each rank's indices: all ranks' together are an epoch's, in the order of one process."""

from __future__ import annotations

import copy
import itertools
import pickle
import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler as TorchSampler

import lockstep
from lockstep.errors import CollectiveMismatch, PeerLost
from lockstep.same_bits import exclusive
from tests.counts import num_examples
from tests.ranks import BACKENDS, run_ranks

by_size = st.integers(0, 40), st.integers(1, 6)


class Drawing:
    """A sampler that draws from torch's or Python's random numbers, and isn't torch's."""

    def __init__(self, length: int, of_torch: bool) -> None:
        self.length, self.of_torch = length, of_torch

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        if self.of_torch:
            return iter(torch.randperm(self.length).tolist())
        return iter(random.sample(range(self.length), self.length))


class Stream(IterableDataset[int]):
    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def parts_of(dataset: Any, num_ranks: int, epoch: int = 0, **kwargs: Any) -> list[list[Any]]:
    """All ranks' indices, by hand."""
    parts = []
    for rank in range(num_ranks):
        sampler = lockstep.DistributedSampler(dataset, num_ranks, rank, **kwargs)
        sampler.set_epoch(epoch)
        parts.append([*sampler])
        assert len(parts[-1]) == len(sampler)
    return parts


def interleaved(parts: list[list[Any]]) -> list[Any]:
    longest = max(map(len, parts))
    return [part[place] for place in range(longest) for part in parts if place < len(part)]


# The indices.


@settings(max_examples=num_examples(300, soon=100))
@given(*by_size, st.booleans(), st.booleans(), st.integers(0, 3), st.integers(0, 5))
def test_indices_are_torchs(
    length: int, num_ranks: int, shuffle: bool, drop_last: bool, seed: int, epoch: int
) -> None:
    options = {"shuffle": shuffle, "seed": seed, "drop_last": drop_last}
    for rank in range(num_ranks):
        ours = lockstep.DistributedSampler(range(length), num_ranks, rank, **options)
        theirs = TorchSampler(range(length), num_ranks, rank, **options)
        ours.set_epoch(epoch)
        theirs.set_epoch(epoch)
        assert [*ours] == [*theirs]
        for name in ("num_samples", "total_size", "drop_last", "shuffle", "seed", "epoch", "rank"):
            assert getattr(ours, name) == getattr(theirs, name)
        assert len(ours) == len(theirs)
        assert isinstance(ours, TorchSampler)


@settings(max_examples=num_examples(300, soon=100))
@given(*by_size, st.booleans(), st.integers(0, 5))
def test_exact_parts_are_one_process_order(
    length: int, num_ranks: int, shuffle: bool, epoch: int
) -> None:
    parts = parts_of(range(length), num_ranks, epoch, shuffle=shuffle, mode="exact")
    (alone,) = parts_of(range(length), 1, epoch, shuffle=shuffle, mode="exact")
    assert interleaved(parts) == alone
    assert sorted(alone) == [*range(length)]
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize("mode", ["pad", "drop", "exact"])
@settings(max_examples=num_examples(60, soon=20))
@given(length=st.integers(1, 30), num_ranks=st.integers(1, 4), size=st.integers(1, 5))
def test_batches_of_a_batch_sampler_are_shared_out(
    mode: Any, length: int, num_ranks: int, size: int
) -> None:
    batches = BatchSampler(RandomSampler(range(length)), size, drop_last=False)
    parts = parts_of(batches, num_ranks, epoch=3, mode=mode)
    (alone,) = parts_of(batches, 1, epoch=3)
    indices = [index for batch in alone for index in batch]
    assert sorted(indices) == [*range(length)]
    if mode == "exact":
        assert interleaved(parts) == alone
    elif mode == "drop":
        assert interleaved(parts) == alone[: len(alone) // num_ranks * num_ranks]
    else:
        assert interleaved(parts)[: len(alone)] == alone
        assert len({*map(len, parts)}) == 1


@pytest.mark.parametrize(
    "source",
    [
        lambda: RandomSampler(range(12)),
        lambda: RandomSampler(
            range(12), generator=torch.Generator().manual_seed(random.randrange(9))
        ),
        lambda: BatchSampler(RandomSampler(range(12), generator=torch.Generator()), 2, False),
        lambda: WeightedRandomSampler([0.1] * 12, 12, generator=torch.Generator()),
        lambda: Drawing(12, of_torch=True),
        lambda: Drawing(12, of_torch=False),
    ],
)
def test_sampler_draws_the_same_on_all_ranks_and_anew_in_each_epoch(source: Any) -> None:
    before = torch.get_rng_state(), random.getstate()

    def body(rank: int, group: dist.ProcessGroup) -> list[Any]:
        sampler = lockstep.DistributedSampler(source(), mode="exact", process_group=group)
        return [[*sampler] for _ in range(3)]

    by_rank = run_ranks(2, body)
    assert torch.equal(torch.get_rng_state(), before[0])
    epochs = [interleaved(list(parts)) for parts in zip(*by_rank, strict=True)]
    assert epochs == [parts_of(source(), 1, epoch)[0] for epoch in range(3)]
    assert epochs[0] != epochs[1] != epochs[2]


def test_epochs_advance_by_themselves_or_by_set_epoch() -> None:
    def order(epoch: int) -> list[int]:
        return parts_of(range(20), 1, epoch)[0]

    sampler: Any = lockstep.DistributedSampler(range(20), 1, 0)
    assert sampler.epoch == 0
    assert [[*sampler], [*sampler], [*sampler]] == [order(0), order(1), order(2)]
    assert sampler.epoch == 2
    sampler.set_epoch(7)
    assert [[*sampler], [*sampler]] == [order(7), order(8)]
    for epoch in (0, 1):  # as trainers do
        sampler.set_epoch(epoch)
        assert [*sampler] == order(epoch)
    restored: Any = lockstep.DistributedSampler(range(20), 1, 0)
    restored.load_state_dict(sampler.state_dict())
    assert [*restored] == order(2)


class Stateful:
    """A loader that saves its sampler and the sampler's iterator, in the order of torchdata's."""

    def __init__(self, sampler: Any, state: Any = None) -> None:
        self.sampler, self.given = sampler, iter(sampler)
        if state is not None:
            sampler.load_state_dict(state["sampler"])
            self.given = iter(sampler)
            self.given.load_state_dict(state["given"])
            if state["is_over"]:
                self.given = iter(sampler)

    def state_dict(self, *, is_over: bool) -> Any:
        states = {"sampler": self.sampler.state_dict(), "given": self.given.state_dict()}
        return states | {"is_over": is_over}


@pytest.mark.parametrize("mode", ["pad", "drop", "exact"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_loader_that_saves_its_sampler_goes_on_within_the_epoch(backend: str, mode: Any) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        def make() -> Any:
            return lockstep.DistributedSampler(range(9), mode=mode, process_group=group)

        plain = make()
        epochs = [[*plain] for _ in range(3)]
        for number in range(4):
            began = Stateful(make())
            list(began.given)
            began.given = iter(began.sampler)
            taken = [*itertools.islice(began.given, number)]
            again = Stateful(make(), began.state_dict(is_over=False))
            assert [*taken, *again.given] == epochs[1]
            assert [*again.sampler] == epochs[2]
        list(began.given)
        assert [*Stateful(make(), began.state_dict(is_over=True)).given] == epochs[2]
        assert [*Stateful(make(), began.state_dict(is_over=False)).given] == []

    run_ranks(2, body, backend=backend)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_replicas": 4}, "num_replicas was 2, and this one's is 4"),
        ({"mode": "exact"}, "mode was 'pad'"),
        ({"dataset": range(9)}, "length was 8"),
        ({"seed": 1}, "seed was 0"),
        ({"shuffle": False}, "shuffle was True"),
    ],
)
def test_position_in_other_indices_is_refused(options: dict[str, Any], message: str) -> None:
    usual = {"dataset": range(8), "num_replicas": 2, "rank": 0}
    given: Any = iter(lockstep.DistributedSampler(**usual))
    next(given)
    other: Any = iter(lockstep.DistributedSampler(**usual | options))
    with pytest.raises(ValueError, match=message):
        other.load_state_dict(given.state_dict())
    assert other.state_dict()["num_given"] == 0


def test_epoch_is_told_to_the_sampler_within() -> None:
    inner: Any = TorchSampler(range(20), 1, 0)
    sampler: Any = lockstep.DistributedSampler(inner, 1, 0)
    assert [[*sampler], [*sampler]] == [parts_of(range(20), 1, epoch)[0] for epoch in (0, 1)]


def test_evaluation_on_four_ranks_counts_every_sample_once() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> Any:
        sampler: Any = lockstep.DistributedSampler(range(1797), mode="exact", process_group=group)
        counts = {"samples": 0, "sum": 0}
        for batch in DataLoader(range(1797), 64, sampler=sampler):  # type: ignore[arg-type]
            counts["samples"] += len(batch)
            counts["sum"] += int(batch.sum())
        return lockstep.reduce(counts, "sum", process_group=group)

    assert run_ranks(4, body) == [{"samples": 1797, "sum": 1796 * 1797 // 2}] * 4


def test_loader_takes_shared_batches() -> None:
    batches = BatchSampler(SequentialSampler(range(10)), 3, drop_last=False)
    sampler: Any = lockstep.DistributedSampler(batches, 2, 1)
    loaded = [batch.tolist() for batch in DataLoader(range(10), batch_sampler=sampler)]  # type: ignore[arg-type]
    assert loaded == [[3, 4, 5], [9]]


def test_one_rank_without_a_group_has_all_indices() -> None:
    sampler: Any = lockstep.DistributedSampler(range(5), shuffle=False)
    assert [*sampler] == [0, 1, 2, 3, 4]
    assert [*pickle.loads(pickle.dumps(sampler))] == [0, 1, 2, 3, 4]


# Ranks that disagree.


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": 1}, "seed is 1 on rank 2 and 0 on rank 0"),
        ({"mode": "exact"}, "mode is exact on rank 2 and pad on rank 0"),
        ({"shuffle": False}, "shuffle is False on rank 2 and True on rank 0"),
        ({"length": 11}, "length is 11, .* on rank 2 and 12"),
        ({"epoch": 4}, "epoch is 4 on rank 2 and 0 on rank 0"),
        ({"rank": 1}, "rank=1 on ranks 1 and 2"),
    ],
)
def test_ranks_that_disagree_are_named_on_every_rank(
    backend: str, options: dict[str, Any], message: str
) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> Any:
        local = dict(options) if rank == 2 else {}
        length, epoch = local.pop("length", 12), local.pop("epoch", 0)
        sampler: Any = lockstep.DistributedSampler(range(length), process_group=group, **local)
        sampler.set_epoch(epoch)
        with pytest.raises(CollectiveMismatch, match=message) as caught:
            iter(sampler)
        assert caught.value.ranks == (2,)
        same: Any = lockstep.DistributedSampler(range(12), process_group=group)
        return [*same]  # the group works on

    assert sorted(interleaved(run_ranks(3, body, backend=backend))) == [*range(12)]


def test_sampler_of_another_order_on_each_rank_is_named() -> None:
    class Own(Drawing):
        def __iter__(self) -> Iterator[int]:
            return iter([self.length - 1, *range(self.length - 1)][:: -1 if self.of_torch else 1])

    def body(rank: int, group: dist.ProcessGroup) -> None:
        sampler = lockstep.DistributedSampler(Own(5, rank == 1), process_group=group)
        with pytest.raises(
            CollectiveMismatch, match=r"order of the sampler.* on rank 1 and.* in the same order"
        ):
            iter(sampler)

    run_ranks(2, body)


def test_ranks_by_hand_may_have_any_order() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> list[int]:
        sampler: Any = lockstep.DistributedSampler(
            range(6), 2, 1 - rank, shuffle=False, process_group=group
        )
        return [*sampler]

    assert run_ranks(2, body) == [[1, 3, 5], [0, 2, 4]]


def test_rank_that_does_not_come_is_named() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        sampler = lockstep.DistributedSampler(range(6), process_group=group)
        if rank == 0:
            with pytest.raises((PeerLost, lockstep.errors.CollectiveTimeout)) as caught:
                iter(sampler)
            assert caught.value.ranks == (1,)

    run_ranks(2, body, group_timeout_seconds=1)


def test_loops_of_different_length_in_join() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> Any:
        net = nn.Linear(1, 1).double()
        nn.init.zeros_(net.weight)
        nn.init.zeros_(net.bias)
        model = lockstep.parallelize(net, process_group=group)
        sampler: Any = lockstep.DistributedSampler(range(5), mode="exact", process_group=group)
        seen = []
        with lockstep.join(model):
            for _ in range(2):
                for index in sampler:
                    model(torch.ones(1, 1, dtype=torch.float64)).sum().backward()
                    seen.append(index)
        return seen

    assert [*map(len, run_ranks(2, body))] == [6, 4]


# What is refused.


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"dataset": Stream()}, TypeError, "dataset is .* of known length"),
        ({"dataset": iter([1])}, TypeError, "dataset is .* of known length"),
        (
            {"dataset": BatchSampler(iter([1, 2]), 2, False)},
            TypeError,
            "dataset is .* of known len",
        ),  # type: ignore[arg-type]
        ({"mode": "even"}, ValueError, "mode is 'even'"),
        ({"mode": "exact", "drop_last": True}, ValueError, "mode is 'exact'.* fits drop_last"),
        ({"rank": 2}, ValueError, "rank"),
        ({"rank": -1}, ValueError, "rank"),
        ({"num_replicas": 0}, ValueError, "num_replicas is 0"),
        ({"num_replicas": 1.5}, TypeError, "num_replicas is 1.5"),
        ({"seed": None}, TypeError, "seed is None"),
        ({"process_group": 1}, TypeError, "process_group"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(
    arguments: dict[str, Any], kind: type[Exception], message: str
) -> None:
    usual = {"dataset": range(4), "num_replicas": 2, "rank": 0}
    with pytest.raises(kind, match=message):
        lockstep.DistributedSampler(**usual | arguments)


def test_length_that_changes_is_refused() -> None:
    data = [1, 2, 3]
    sampler = lockstep.DistributedSampler(data, 1, 0)
    data.append(4)
    with pytest.raises(ValueError, match="list has 4 elements now, and its length was 3"):
        iter(sampler)
    short = Drawing(3, of_torch=True)
    wrapping = lockstep.DistributedSampler(short, 1, 0)
    short.length = 2
    with pytest.raises(ValueError, match="Drawing has 2 indices in this epoch"):
        iter(wrapping)


def test_copies_are_of_no_group() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> Any:
        sampler = lockstep.DistributedSampler(range(4), shuffle=False, process_group=group)
        return [*copy.deepcopy(sampler)] if rank else [0, 2]

    assert run_ranks(2, body) == [[0, 2], [1, 3]]


def test_orders_are_not_drawn_while_a_loader_reads_from_the_same_generators() -> None:
    sampler = lockstep.DistributedSampler(Drawing(4, True), 2, 0)
    drawing = threading.Thread(target=list, args=(sampler,))
    with exclusive:
        drawing.start()
        drawing.join(0.1)
        assert drawing.is_alive()
    drawing.join(10)
    assert not drawing.is_alive()


def test_generators_are_left_as_they_were() -> None:
    generator = torch.Generator().manual_seed(3)
    sampler = lockstep.DistributedSampler(
        RandomSampler(range(20), generator=generator), num_replicas=2, rank=0
    )
    before = random.getstate(), torch.get_rng_state(), generator.get_state()
    assert len([*sampler]) == 10
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    assert torch.equal(generator.get_state(), before[2])
