"""Datasets that are divided among the ranks already, and those that leave it to the loader."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import (
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
    get_worker_info,
    random_split,
)

import lockstep
from lockstep.errors import SplitError
from tests.ranks import run_ranks

LENGTH = 24


class Numbers(IterableDataset[int]):
    """Numbers of which a part is left out, by what is known of ranks and workers."""

    def part(self) -> tuple[int, int]:
        info = get_worker_info()
        return (0, 1) if info is None else (info.id, info.num_workers)

    def order(self) -> list[int]:
        return [*range(LENGTH)]

    def __iter__(self) -> Iterator[int]:
        first, step = self.part()
        return iter(self.order()[first::step])


class OfARank(Numbers):
    """As HF's split_dataset_by_node: made for a rank, and divided among its workers later."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.rank, self.num_ranks = rank, num_ranks

    def part(self) -> tuple[int, int]:
        number, num_workers = super().part()
        return self.rank * num_workers + number, self.num_ranks * num_workers


class OfARankAlone(OfARank):
    """One that doesn't know of workers."""

    def part(self) -> tuple[int, int]:
        return self.rank, self.num_ranks


class InDisorder(OfARank):
    """In an order that all ranks draw alike."""

    def order(self) -> list[int]:
        return torch.randperm(LENGTH).tolist()


class Named(Numbers):
    """Differs between the ranks, and doesn't divide itself."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.path = f"/cache/{rank}"


class Drawn(OfARank):
    """In an order of which nobody knows where it comes from."""

    def order(self) -> list[int]:
        return random.SystemRandom().sample(range(LENGTH), LENGTH)


class Once(OfARank):
    """A stream that can't begin again."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        super().__init__(rank, num_ranks)
        self.stream = iter(range(rank, LENGTH, num_ranks))

    def __iter__(self) -> Iterator[int]:
        return self.stream


class OfFiles(OfARank):
    """As webdataset: reads whole files, and refuses to be a worker that gets none of them."""

    def __init__(self, rank: int, num_ranks: int, num_files: int = 4) -> None:
        super().__init__(rank, num_ranks)
        self.num_files = num_files

    def __iter__(self) -> Iterator[int]:
        number, num_workers = Numbers.part(self)
        files = range(self.rank, self.num_files, self.num_ranks)[number::num_workers]
        if not files:
            raise ValueError("fewer files than workers")
        return (number for file in files for number in range(file, LENGTH, self.num_files))


class Asking(Numbers):
    """As webdataset's split_by_node."""

    def part(self) -> tuple[int, int]:
        number, num_workers = super().part()
        return dist.get_rank() * num_workers + number, dist.get_world_size() * num_workers


class AskingToSay(Numbers):
    """Asks for its rank, and doesn't divide itself."""

    def part(self) -> tuple[int, int]:
        os.environ.get("RANK", "?") + str(dist.get_rank())
        return super().part()


def samples(dataset: Any, group: dist.ProcessGroup | None, **options: Any) -> list[list[int]]:
    """The samples of two epochs."""
    loader = lockstep.DataLoader(dataset, 5, seed=1, process_group=group, **options)
    return [[number for batch in loader for number in batch.tolist()] for _ in range(2)]


def assert_once(by_rank: list[list[list[int]]]) -> None:
    for epoch in zip(*by_rank, strict=True):
        assert sorted(itertools.chain(*epoch)) == [*range(LENGTH)]


@pytest.mark.parametrize("make", [OfARank, OfARankAlone, InDisorder, Named])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_each_sample_comes_once_whoever_divides(
    make: Callable[[int, int], Any], num_ranks: int
) -> None:
    assert_once(run_ranks(num_ranks, lambda rank, group: samples(make(rank, num_ranks), group)))


@pytest.mark.parametrize("make", [OfARank, Named, OfFiles])
def test_with_workers(make: Callable[[int, int], Any]) -> None:
    options = {"num_workers": 2, "multiprocessing_context": "fork", "persistent_workers": True}
    assert_once(run_ranks(2, lambda rank, group: samples(make(rank, 2), group, **options)))


def test_a_dataset_that_fails_as_one_of_more_workers_than_there_are() -> None:
    assert_once(run_ranks(2, lambda rank, group: samples(OfFiles(rank, 2, 2), group)))


@pytest.mark.parametrize("makes", [lambda rank: OfFiles(rank, 2, 0), lambda _: OfFiles(0, 2, 0)])
def test_a_dataset_that_fails_in_any_case_raises_what_it_raised(makes: Any) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        with pytest.raises(ValueError, match="fewer files"):
            samples(makes(rank), group)

    run_ranks(2, body)


@pytest.mark.parametrize("make", [Asking, AskingToSay])
def test_a_dataset_that_asks_for_its_rank(make: Callable[[], Any]) -> None:
    found = lockstep.launch(lambda _: samples(make(), None), nprocs=2, ranks="threads")
    assert_once(found)


RANK: Any = None  # as a script sets it, from the environment


class OfAConstant(Numbers):
    def part(self) -> tuple[int, int]:
        return RANK.rank, 2


def of_this_rank(numbers: list[int]) -> list[int]:
    return numbers[RANK.rank :: 2]


class OfAFunction(Numbers):
    """Calls a function that refers to the rank."""

    def __iter__(self) -> Iterator[int]:
        return iter(of_this_rank(self.order()))


@pytest.mark.parametrize("make", [OfAConstant, OfAFunction])
def test_a_dataset_that_refers_to_its_rank(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], Any]
) -> None:
    """Ranks that are threads have one module; what their code refers to differs by thread."""

    class Mine:
        @property
        def __dict__(self) -> dict[str, int]:  # type: ignore[override]
            return {"rank": self.rank}

        @property
        def rank(self) -> int:
            return dist.get_rank()

    monkeypatch.setitem(globals(), "RANK", Mine())
    assert_once(lockstep.launch(lambda _: samples(make(), None), nprocs=2, ranks="threads"))


@pytest.mark.parametrize("make", [Drawn, Once])
def test_what_cannot_be_told_is_refused(make: Callable[[int, int], Any]) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        with pytest.raises(SplitError, match="self_sharding=True"):
            samples(make(rank, 2), group)

    run_ranks(2, body)


@pytest.mark.parametrize(("make", "is_said"), [(OfARank, True), (Once, True), (Named, False)])
def test_it_can_be_said(make: Callable[[int, int], Any], is_said: bool) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> list[int]:
        loader = lockstep.DataLoader(make(rank, 2), 5, self_sharding=is_said, process_group=group)
        return [number for batch in loader for number in batch.tolist()]

    assert sorted(itertools.chain(*run_ranks(2, body))) == [*range(LENGTH)]


def test_workers_that_give_the_same_samples_are_named_with_the_cure() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        options = {"num_workers": 2, "multiprocessing_context": "fork"}
        with pytest.raises(SplitError, match=r"worker 0 of rank 0 and to worker 1.*one w"):
            samples(OfARankAlone(rank, 2), group, **options)

    run_ranks(2, body)


def test_an_epoch_goes_on_in_its_midst() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> tuple[list[Any], list[Any]]:
        def make() -> Any:
            options = {"num_workers": 2, "multiprocessing_context": "fork"}
            return lockstep.DataLoader(OfARank(rank, 2), 4, seed=1, process_group=group, **options)

        loader = make()
        list(loader)  # from the second epoch on nothing is tried
        begun = iter(loader)
        next(begun)
        again = make()
        again.load_state_dict(loader.state_dict())
        rest = [batch.tolist() for batch in again]
        return rest, [batch.tolist() for batch in begun]

    for rest, expected in run_ranks(2, body):
        assert rest == expected


def test_a_rank_without_samples_leaves_the_programs_random_state() -> None:
    class Noisy(Numbers):
        def __iter__(self) -> Iterator[int]:
            first, step = self.part()
            return iter([int(torch.randint(9, ())) for _ in range(3)][first::step])

    def body(rank: int, group: dist.ProcessGroup) -> torch.Tensor:
        loader = lockstep.DataLoader(Noisy(), 4, seed=1, process_group=group)
        before = torch.get_rng_state()
        list(loader)
        return (before == torch.get_rng_state()).all()

    assert all(run_ranks(4, body))


class Generators(Dataset[Any]):
    """Draws from generators of its own."""

    def __init__(self) -> None:
        self.torch = torch.Generator().manual_seed(1)
        self.transforms = [{"numpy": np.random.default_rng()}, random.Random(1)]
        self.state = np.random.RandomState(1)

    def __len__(self) -> int:
        return 13

    def __getitem__(self, index: int) -> Any:
        numpy, python = self.transforms[0]["numpy"], self.transforms[1]
        drawn = torch.rand((), generator=self.torch).item(), numpy.random()
        return index, *drawn, python.random(), self.state.rand()


class Lazy(Generators):
    """Makes them with the first sample."""

    def __init__(self) -> None:
        self.is_made = False

    def __getitem__(self, index: int) -> Any:
        if not self.is_made:
            super().__init__()
            self.is_made = True
        return super().__getitem__(index)


@pytest.mark.parametrize("make", [Generators, Lazy])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_generators_of_a_dataset_draw_the_same_for_any_number_of_ranks(
    num_workers: int, make: Callable[[], Any]
) -> None:
    def body(rank: int, group: dist.ProcessGroup | None) -> list[list[float]]:
        loader = lockstep.DataLoader(
            make(), 6, seed=1, num_workers=num_workers, process_group=group
        )
        batches = [torch.stack([*map(torch.as_tensor, batch)], 1) for batch in loader]
        return torch.cat(batches).tolist()

    expected = body(0, None)
    assert len({tuple(draws) for _, *draws in expected}) == 13
    assert sorted(itertools.chain(*run_ranks(3, body))) == sorted(expected)


PARTS = {
    "a subset": lambda rank, x: Subset(TensorDataset(x), range(rank, len(x), 2)),
    "tensors": lambda rank, x: TensorDataset(x[rank::2]),
    "a list": lambda rank, x: x[rank::2].tolist(),
    "a split of each rank's own": lambda rank, x: random_split(
        TensorDataset(x), [0.5, 0.5], torch.Generator().manual_seed(rank)
    )[0],
}


@pytest.mark.parametrize("make", PARTS.values(), ids=PARTS.keys())
def test_a_dataset_of_a_rank_is_refused(make: Callable[[int, torch.Tensor], Any]) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        dataset = make(rank, torch.arange(20.0))
        with pytest.raises(SplitError, match=r"datasets differ.*sample .* rank 1"):
            next(iter(lockstep.DataLoader(dataset, 4, process_group=group)))

    run_ranks(2, body)


def test_datasets_may_differ_in_what_their_samples_do_not_show() -> None:
    class Cached(Dataset[int]):
        def __init__(self, path: str) -> None:
            self.path = path

        def __len__(self) -> int:
            return 10

        def __getitem__(self, index: int) -> Any:
            return index, torch.rand(())  # the same on each rank

    def body(rank: int, group: dist.ProcessGroup) -> list[int]:
        loader = lockstep.DataLoader(Cached(f"/cache/{rank}"), 4, process_group=group)
        return [number for batch, _ in loader for number in batch.tolist()]

    assert sorted(itertools.chain(*run_ranks(2, body))) == [*range(10)]
