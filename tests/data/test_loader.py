"""DataLoader: each sample once, in the same global batches at any number of ranks and workers."""

from __future__ import annotations

import gc
import itertools
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import random
import threading
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

import lockstep
from lockstep.data.pace import Pace
from lockstep.errors import SplitError
from tests.data.datasets import Augmented, Halves, Stream
from tests.data.numbers import Numbers
from tests.ranks import run_ranks

Epoch = list[list[int]]  # the samples of each global batch


SAMPLERS: dict[str, Callable[[int, int], dict[str, Any]]] = {
    "in order": lambda n, size: {"batch_size": size},
    "shuffled": lambda n, size: {"batch_size": size, "shuffle": True},
    "drop_last": lambda n, size: {"batch_size": size, "shuffle": True, "drop_last": True},
    "own sampler": lambda n, size: {"batch_size": size, "sampler": Halves(n)},
    "batch_sampler": lambda n, size: {
        "batch_sampler": BatchSampler(RandomSampler(range(n)), size, False)
    },
}


def joined(by_rank: list[Epoch]) -> Epoch:
    """The global batches of ranks that have taken equally many steps."""
    assert len({len(epoch) for epoch in by_rank}) == 1
    return [[*itertools.chain(*parts)] for parts in zip(*by_rank, strict=True)]


def numbers_of(batch: torch.Tensor) -> list[int]:
    return list(batch.tolist())


@st.composite
def plans(draw: st.DrawFn) -> dict[str, Any]:
    size = draw(st.integers(4, 12))
    return {
        "length": draw(st.integers(1, 40)),
        "size": size,
        "sampler": draw(st.sampled_from(sorted(SAMPLERS))),
        "seed": draw(st.integers(0, 2**40)),
        "ranks": draw(st.lists(st.integers(1, 4), min_size=2, max_size=3)),
        "shares": draw(st.sampled_from([None, "odd", "auto"])),
        "stop": draw(st.integers(0, 12)),
    }


def loader(plan: dict[str, Any], group: dist.ProcessGroup, **more: Any) -> Any:
    options = SAMPLERS[plan["sampler"]](plan["length"], plan["size"])
    shares = plan["shares"]
    if shares == "odd":
        shares = [1 + 2 * rank for rank in range(group.size())]
    return lockstep.DataLoader(
        Numbers(plan["length"]),
        seed=plan["seed"],
        shares=shares,
        process_group=group,
        **options,
        **more,
    )


def epochs(plan: dict[str, Any], num_ranks: int, count: int) -> list[Epoch]:
    def body(rank: int, group: dist.ProcessGroup) -> list[Epoch]:
        each = loader(plan, group)
        return [[numbers_of(batch) for batch in each] for _ in range(count)]

    by_rank = run_ranks(num_ranks, body)
    return [joined([one[epoch] for one in by_rank]) for epoch in range(count)]


@given(plans())
def test_global_batches_are_those_of_one_rank(plan: dict[str, Any]) -> None:
    expected = epochs(plan, 1, 2)
    for epoch in expected:
        samples = [*itertools.chain(*epoch)]
        if plan["sampler"] == "drop_last":
            assert len(samples) == plan["length"] // plan["size"] * plan["size"]
            assert len(set(samples)) == len(samples)
        else:
            assert sorted(samples) == list(range(plan["length"]))
    for num_ranks in plan["ranks"]:
        assert epochs(plan, num_ranks, 2) == expected


@given(plans())
def test_an_interrupted_epoch_goes_on_at_any_number_of_ranks(plan: dict[str, Any]) -> None:
    expected = epochs(plan, 1, 2)
    seen: list[Epoch] = [[], []]
    state: dict[str, Any] | None = None
    for num_ranks in [*plan["ranks"], 1]:

        def body(
            rank: int,
            group: dist.ProcessGroup,
            state: dict[str, Any] | None = state,
            is_last: bool = num_ranks == 1,
        ) -> tuple[Any, list[tuple[int, list[int]]]]:
            each, found = loader(plan, group), []
            if state is not None:
                each.load_state_dict(state)
            while (epoch := each.state_dict()["epoch"]) < 2:
                for batch in each:
                    found.append((epoch, numbers_of(batch)))
                    if not is_last and len(found) > plan["stop"]:
                        return each.state_dict(), found
            return each.state_dict(), found

        results = run_ranks(num_ranks, body)
        assert all(result[0] == results[0][0] for result in results)
        state = results[0][0]
        for parts in zip(*(found for _, found in results), strict=True):
            seen[parts[0][0]].append([*itertools.chain(*(part for _, part in parts))])
    assert seen == expected


@pytest.mark.parametrize(
    "start",
    ["fork", *(pytest.param(start, marks=pytest.mark.long) for start in ("spawn", "forkserver"))],
)
def test_augmentations_are_the_same_at_any_number_of_ranks_and_workers(start: str) -> None:
    def body(rank: int, group: dist.ProcessGroup, workers: int = 0) -> list[Any]:
        options = {"multiprocessing_context": start, "persistent_workers": True} if workers else {}
        each = lockstep.DataLoader(
            Augmented(11),
            4,
            shuffle=True,
            seed=5,
            num_workers=workers,
            process_group=group,
            **options,
        )
        return [[torch.stack([*map(torch.Tensor.double, b)], 1) for b in each] for _ in range(2)]

    alone = run_ranks(1, body)[0]
    tracker = multiprocessing.resource_tracker._resource_tracker
    was_running = tracker._fd is not None  # for semaphores of others, such as joblib
    try:
        in_workers = run_ranks(1, lambda rank, group: body(rank, group, 2))[0]
    finally:
        # The semaphores of a queue to a worker are there until the thread that feeds it has ended,
        # which takes long on a busy machine. The tracker would remove them first, and fail.
        gc.collect()
        for thread in threading.enumerate():
            if thread.name == "QueueFeederThread":
                thread.join(60)
        # Python keeps these two for the next workers.
        multiprocessing.forkserver._forkserver._stop()
        if not was_running:
            tracker._stop()
    ranks = run_ranks(3, body)
    for epoch in range(2):
        for step, batch in enumerate(alone[epoch]):
            assert torch.equal(batch, in_workers[epoch][step])
            assert torch.equal(batch, torch.cat([rank[epoch][step] for rank in ranks]))
    drawn = torch.cat(alone[0] + alone[1])[:, 1:]
    assert len(drawn.flatten().unique()) == drawn.numel()


def test_the_program_has_its_own_random_numbers() -> None:
    each = lockstep.DataLoader(Augmented(8), 4, seed=5)
    next(iter(each))  # finds that the dataset draws
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    expected = torch.rand(1), np.random.rand()
    torch.manual_seed(1)
    np.random.seed(1)
    for _ in each:
        pass
    assert (torch.rand(1), np.random.rand()) == expected


def test_workers_and_prefetched_batches_are_counted_right() -> None:
    options = {"batch_size": 5, "shuffle": True, "seed": 9}
    dataset = Numbers(43)
    whole = [numbers_of(batch) for batch in lockstep.DataLoader(dataset, **options)]
    first = lockstep.DataLoader(dataset, **options, num_workers=2)
    begun = iter(first)
    seen = [numbers_of(next(begun)) for _ in range(3)]
    state = first.state_dict()
    del begun
    second = lockstep.DataLoader(dataset, **options, num_workers=1, prefetch_factor=3)
    second.load_state_dict(state)
    seen += [numbers_of(batch) for batch in second]
    assert seen == whole
    assert second.state_dict()["epoch"] == 1
    assert second.state_dict()["num_batches"] == 0


def test_evaluation_counts_each_sample() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> int:
        each = lockstep.DataLoader(Numbers(1797), 128, process_group=group)
        assert len(each) == 15
        return sum(len(batch) for batch in each)

    assert sum(run_ranks(4, body)) == 1797


def test_a_rank_without_samples_gets_an_empty_batch() -> None:
    class Things(Numbers):
        def __getitem__(self, index: int) -> Any:
            return {"x": torch.ones(3, 2), "name": "a", "pair": (index, [1.0, 2.0])}

    def body(rank: int, group: dist.ProcessGroup) -> Any:
        *_, last = lockstep.DataLoader(Things(9), 4, process_group=group)
        return last

    *_, last = run_ranks(4, body)
    assert last["x"].shape == (0, 3, 2)
    assert last["name"] == []
    assert last["pair"][0].shape == (0,)
    assert [each.shape for each in last["pair"][1]] == [(0,), (0,)]


def test_lists_of_indices_are_shared_where_the_dataset_makes_batches() -> None:
    class Table:
        def __getitem__(self, indices: list[int]) -> torch.Tensor:
            return torch.tensor(indices)

        def __len__(self) -> int:
            return 10

    sampler = BatchSampler(range(10), 4, False)

    def body(rank: int, group: dist.ProcessGroup) -> Epoch:
        each = lockstep.DataLoader(Table(), None, sampler=sampler, process_group=group)
        return [numbers_of(batch) for batch in each]

    assert joined(run_ranks(3, body)) == [list(batch) for batch in sampler]
    with pytest.raises(SplitError, match="can't be cut"):
        run_ranks(2, lambda rank, group: lockstep.DataLoader(Numbers(3), None, process_group=group))
    assert [int(x) for x in lockstep.DataLoader(Numbers(3), None)] == [0, 1, 2]


def test_samples_may_repeat_where_they_are_drawn_with_replacement() -> None:
    sampler = WeightedRandomSampler([1.0, 5.0, 1.0], 30)
    assert sum(len(b) for b in lockstep.DataLoader(Numbers(3), 4, sampler=sampler)) == 30


def test_epochs_advance_and_can_be_set() -> None:
    each = lockstep.DataLoader(Numbers(20), 20, shuffle=True, seed=1)
    first, second = numbers_of(next(iter(each))), numbers_of(next(iter(each)))
    assert first != second
    each.set_epoch(0)
    assert numbers_of(next(iter(each))) == first
    assert numbers_of(next(iter(each))) == second


def test_the_seed_is_that_of_the_first_rank_or_of_the_generator() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> Epoch:
        generator = torch.Generator().manual_seed(3)
        each = lockstep.DataLoader(
            Numbers(9), 4, shuffle=True, generator=generator, process_group=group
        )
        return [numbers_of(batch) for batch in each]

    assert joined(run_ranks(2, body)) == joined(run_ranks(1, body))
    torch.manual_seed(4)
    one = [numbers_of(batch) for batch in lockstep.DataLoader(Numbers(9), 4, shuffle=True)]
    torch.manual_seed(5)
    other = [numbers_of(batch) for batch in lockstep.DataLoader(Numbers(9), 4, shuffle=True)]
    torch.manual_seed(4)
    assert one == [numbers_of(b) for b in lockstep.DataLoader(Numbers(9), 4, shuffle=True)]
    assert one != other


def test_shares_are_in_proportion() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> list[int]:
        return [*map(len, lockstep.DataLoader(Numbers(10), 8, shares=[3, 1], process_group=group))]

    assert run_ranks(2, body) == [[6, 2], [2, 0]]


def test_shares_follow_the_ranks_pace() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> list[int]:
        each = lockstep.DataLoader(Numbers(40 * 8), 8, shares="auto", process_group=group)
        sizes = []
        for batch in each:
            sizes.append(len(batch))
            each._pace._began -= len(batch) * (3.0 if rank else 1.0)  # as if it had taken so long
        return sizes

    fast, slow = run_ranks(2, body)
    assert fast[:8] == slow[:8] == [4] * 8
    assert fast[-8:] == [6] * 8
    assert slow[-8:] == [2] * 8


def test_measured_shares_of_batches_that_may_be_read_ahead_stay() -> None:
    """Workers of another rank may have cut these batches already, by the same shares."""

    def body(rank: int, group: dist.ProcessGroup) -> list[tuple[int, ...]]:
        pace, known = Pace(group, ahead := 20), dict[int, tuple[int, ...]]()
        pace.restart()
        for number in range(1, 80):  # the program has batch number - 1
            for later in range(number - 1, number + ahead - 1):
                assert known.setdefault(later, pace.shares_at(later)) == pace.shares_at(later)
            pace.begin()
            pace._began -= 1  # as if it had taken so long
            pace.end(number, 1 + number % 30 * (1 + rank))
        return [*known.values()]

    first, second = run_ranks(2, body)
    assert first == second
    assert len({*first}) > 2


@given(
    length=st.integers(0, 40),
    size=st.integers(4, 9),
    num_ranks=st.integers(1, 4),
    drop_last=st.booleans(),
    stop=st.integers(0, 8),
)
def test_an_iterable_dataset_is_divided_among_ranks(
    length: int, size: int, num_ranks: int, drop_last: bool, stop: int
) -> None:
    def body(rank: int, group: dist.ProcessGroup, *, resumes: bool = False) -> Epoch:
        def make() -> Any:
            return lockstep.DataLoader(
                Stream(length), size, seed=1, drop_last=drop_last, process_group=group
            )

        each, found = make(), []
        for batch in each:
            found.append(numbers_of(batch))
            if resumes and len(found) > stop:
                again = make()
                again.load_state_dict(each.state_dict())
                return found + [numbers_of(batch) for batch in again]
        return found

    if 0 < length < num_ranks and not drop_last:
        length = num_ranks
    whole = joined(run_ranks(num_ranks, body))
    samples = [*itertools.chain(*whole)]
    assert len(set(samples)) == len(samples)
    assert drop_last or sorted(samples) == list(range(length))
    assert joined(run_ranks(num_ranks, lambda *each: body(*each, resumes=True))) == whole


def test_an_iterable_dataset_is_divided_among_workers_of_ranks() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> list[Epoch]:
        each = lockstep.DataLoader(
            Stream(37), 6, num_workers=2, persistent_workers=True, process_group=group
        )
        return [[numbers_of(batch) for batch in each] for _ in range(2)]

    for epoch in zip(*run_ranks(2, body), strict=True):
        assert sorted(itertools.chain(*joined(list(epoch)))) == list(range(37))


def test_it_is_torchs_loader_with_torchs_attributes() -> None:
    dataset = TensorDataset(torch.arange(10.0))
    each = lockstep.DataLoader(dataset, 4, shuffle=True, pin_memory=False)
    assert isinstance(each, torch.utils.data.DataLoader)
    assert (each.dataset, each.batch_size, len(each)) == (dataset, 4, 3)
    assert isinstance(each.sampler, RandomSampler)


def start_of_worker(worker_id: int) -> None:
    info = get_worker_info()
    assert info is not None
    assert info.id == worker_id
    info.dataset.length = 7  # type: ignore[attr-defined]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_rows_of_tensors_are_the_batches_that_torch_makes(num_workers: int) -> None:
    dataset = TensorDataset(torch.randn(10, 3), torch.arange(10), torch.randn(10) > 0)
    for batches in (
        [[3, 1, 2], [-1, 0], [9]],
        [[slice(0, 2), slice(2, 4)]],  # the first of them has two dimensions more
        [[True]],  # an index that adds a dimension, and no mask
    ):
        ours = lockstep.DataLoader(dataset, batch_sampler=batches, num_workers=num_workers)
        theirs = torch.utils.data.DataLoader(dataset, batch_sampler=batches)
        for batch, expected in zip(ours, theirs, strict=True):
            assert type(batch) is type(expected)
            assert all(map(torch.equal, batch, expected))
    too_far = lockstep.DataLoader(dataset, batch_sampler=[[10]], num_workers=num_workers)
    with pytest.raises(IndexError, match="out of bounds") as caught:
        next(iter(too_far))
    # Its frames are a cycle that has the iterator. Where garbage collection ends it, the queue to
    # its worker may be gone before, and torch waits for 5 s.
    traceback.clear_frames(caught.tb)


def test_a_worker_is_begun_with_the_users_dataset() -> None:
    each = lockstep.DataLoader(Numbers(6), 3, num_workers=1, worker_init_fn=start_of_worker)
    assert [numbers_of(batch) for batch in each] == [[0, 1, 2], [3, 4, 5]]


def test_the_number_of_samples_is_that_of_all_ranks() -> None:
    data = TensorDataset(torch.arange(10))
    streams = Stream(10)

    def body(rank: int, group: dist.ProcessGroup) -> list[tuple[int, int]]:
        def loader(*args: Any, **options: Any) -> lockstep.DataLoader[Any]:
            return lockstep.DataLoader(data, *args, process_group=group, **options)

        batches = BatchSampler(RandomSampler(data, num_samples=7), 3, drop_last=True)
        loaders = [
            loader(4),
            loader(4, drop_last=True),
            loader(4, sampler=WeightedRandomSampler([1.0] * 10, 6)),
            loader(batch_sampler=batches),
        ]
        for each in loaders:
            given = sum(len(x) for (x,) in each)
            assert lockstep.reduce(given, "sum", process_group=group) == each.num_samples
        with pytest.raises(TypeError, match="A list tells how many batches it gives, not how many"):
            _ = loader(batch_sampler=[[0, 1], [2, 3]]).num_samples
        with pytest.raises(TypeError, match="has no len"):
            _ = lockstep.DataLoader(streams, 4, process_group=group).num_samples
        return [(len(each), each.num_samples) for each in loaders]

    assert run_ranks(2, body) == [[(3, 10), (2, 8), (2, 6), (2, 6)]] * 2
