import pickle
import random
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from lockstep.data import DataPartitioner, Partition, partition
from lockstep.errors import SplitError

weights = st.lists(st.integers(0, 1000), min_size=1, max_size=20).filter(any)
counts = st.lists(st.integers(0, 50), min_size=1, max_size=10)
seeds = st.none() | st.integers()


def fractions_of(weights: list[int]) -> list[float]:
    return [weight / sum(weights) for weight in weights]


def lengths(num_elements: int, sizes: Sequence[float]) -> list[int]:
    return [len(part) for part in partition(range(num_elements), sizes, seed=None)]


def tutorial_partitions(num_elements: int, sizes: Sequence[float], seed: int) -> list[list[int]]:
    """What DataPartitioner of "Writing Distributed Applications with PyTorch" does."""
    rng = random.Random()
    rng.seed(seed)
    indexes = list(range(num_elements))
    rng.shuffle(indexes)
    parts = []
    for fraction in sizes:
        length = int(fraction * num_elements)
        parts.append(indexes[0:length])
        indexes = indexes[length:]
    return parts


class ByTheBatch(Dataset[int]):
    """A dataset that reads a batch in one go."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        raise AssertionError("read one by one")

    def __getitems__(self, indices: list[int]) -> list[int]:
        return indices


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


class StreamOfKnownLength(Stream):
    def __len__(self) -> int:
        return 10


# Every element in exactly one part, in parts of the size asked for.


@given(st.integers(0, 2000), weights, seeds)
def test_partition_by_fractions_holds_every_element_once(
    num_elements: int, weights: list[int], seed: int | None
) -> None:
    parts = partition(range(num_elements), fractions_of(weights), seed)
    assert len(parts) == len(weights)
    assert sorted(element for part in parts for element in part) == list(range(num_elements))


@given(counts, seeds)
def test_partition_by_counts_holds_every_element_once(counts: list[int], seed: int | None) -> None:
    parts = partition(range(sum(counts)), counts, seed)
    assert [len(part) for part in parts] == counts
    assert sorted(element for part in parts for element in part) == list(range(sum(counts)))


@given(st.integers(0, 10**6), weights)
def test_partition_is_within_one_of_the_exact_fraction(
    num_elements: int, weights: list[int]
) -> None:
    for length, weight in zip(lengths(num_elements, fractions_of(weights)), weights, strict=True):
        assert abs(length - num_elements * Fraction(weight, sum(weights))) < 1


@pytest.mark.parametrize(
    ("num_elements", "sizes", "expected"),
    [
        (3, [1 / 3] * 3, [1, 1, 1]),
        (10, [1 / 3] * 3, [4, 3, 3]),
        (10, [0.1] * 10, [1] * 10),
        (1797, [0.1] * 10, [180] * 7 + [179] * 3),
        (10, [0.7, 0.2, 0.1], [7, 2, 1]),
        (5, [1.0], [5]),
        (5, [0.0, 1.0, 0.0], [0, 5, 0]),
        (5, [1, 0.0], [5, 0]),
        (0, [0.5, 0.5], [0, 0]),
        (0, [0], [0]),
        (5, [0, 5, 0], [0, 5, 0]),
        (10, list(np.full(10, 0.1, np.float32)), [1] * 10),
        (10, list(np.array([4, 6])), [4, 6]),
        (10, [Fraction(1, 2), Fraction(1, 2)], [5, 5]),
    ],
)
def test_partition_rounds_by_largest_remainder(
    num_elements: int, sizes: list[float], expected: list[int]
) -> None:
    assert lengths(num_elements, sizes) == expected


# As binary fractions, 0.3 and 0.7 aren't quite 3/10 and 7/10, nor 1/6 + 1/3 + 1/2 quite 1.
@pytest.mark.parametrize(
    ("num_elements", "sizes", "expected"),
    [
        (5, [0.7, 0.3], [4, 1]),
        (5, [0.3, 0.7], [2, 3]),
        (3, [1 / 6, 1 / 3, 1 / 2], [1, 1, 1]),
    ],
)
def test_tie_goes_to_the_lower_part(
    num_elements: int, sizes: list[float], expected: list[int]
) -> None:
    assert lengths(num_elements, sizes) == expected


# The same on every rank, and the same as the tutorial's.


@given(st.integers(0, 500), weights, st.integers())
def test_partition_is_the_same_for_the_same_seed(
    num_elements: int, weights: list[int], seed: int
) -> None:
    ranks = [partition(range(num_elements), fractions_of(weights), seed) for _ in range(2)]
    assert [list(part) for part in ranks[0]] == [list(part) for part in ranks[1]]


@given(st.integers(1, 16), st.integers(1, 50), st.integers())
def test_partition_is_the_tutorials_where_that_divides_evenly(
    world_size: int, each: int, seed: int
) -> None:
    num_elements = world_size * each
    expected = tutorial_partitions(num_elements, [1 / world_size] * world_size, seed)
    by_count = partition(range(num_elements), [each] * world_size, seed)
    by_fraction = partition(range(num_elements), [1 / world_size] * world_size, seed)
    assert [list(part) for part in by_count] == expected
    assert [list(part) for part in by_fraction] == expected


def test_partition_by_default_shuffles_as_the_tutorial_does() -> None:
    expected = tutorial_partitions(100, [0.5, 0.25, 0.25], seed=1234)
    assert [list(part) for part in partition(range(100), [0.5, 0.25, 0.25])] == expected


def test_partition_without_seed_keeps_the_order() -> None:
    parts = partition("abcde", [2, 3], seed=None)
    assert [list(part) for part in parts] == [["a", "b"], ["c", "d", "e"]]


def test_partition_leaves_the_global_random_state_alone() -> None:
    before = random.getstate()
    partition(range(10), [0.5, 0.5])
    assert random.getstate() == before


# What can't be divided so.


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ([6, 3], r"count 9 elements, but the dataset has 10\. Add a last part of 1 for the rest"),
        ([6, 5], r"count 11 elements, but the dataset has 10\. Take 1 away"),
        ([1], r"count 1 elements.* give floats for fractions"),
        ([0.7, 0.2], r"add up to 0\.9, not to 1\. Add a last part of 0\.1 for the rest"),
        ([0.333] * 3, r"add up to 0\.999, not to 1"),
        ([0.7, 0.4], r"add up to 1\.1, not to 1\. Make them smaller, or divide each"),
        ([0.5, 5], r"all are fractions, but 5 is more than the whole"),
        ([0.5, 10**400], r"more than the whole"),
        ([0.0], r"add up to 0, not to 1"),
        ([11, -1], r"sizes\[1\] is -1; a part has a size from 0 up"),
        ([1.5, -0.5], r"sizes\[1\] is -0\.5"),
        ([0.5, float("nan")], r"sizes\[1\] is nan"),
        ([float("inf"), 0.5], r"sizes\[0\] is inf"),
        ([], r"sizes is empty"),
    ],
)
def test_partition_of_sizes_that_do_not_add_up_is_a_split_error(
    sizes: list[float], message: str
) -> None:
    with pytest.raises(SplitError, match=message):
        partition(range(10), sizes)


def test_partition_of_more_float_error_than_floats_have_is_a_split_error() -> None:
    with pytest.raises(SplitError):
        partition(range(10), [0.5, 0.49999])
    assert lengths(10, [0.5, 0.4999999]) == [5, 5]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ([True, 9], r"sizes\[0\] is True, a bool"),
        ([0.5, "0.5"], r"sizes\[1\] is '0\.5', a str"),
        ("55", r"sizes\[0\] is '5', a str"),
        ([None, 10], r"sizes\[0\] is None"),
        (torch.tensor([0.5, 0.5]), r"a Tensor"),
        (2, r"sizes is 2, not one size for each part"),
    ],
)
def test_partition_of_sizes_that_are_not_numbers_is_a_type_error(sizes: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        partition(range(10), sizes)


@pytest.mark.parametrize("dataset", [Stream(), StreamOfKnownLength(), iter([1, 2])])
def test_partition_of_a_stream_is_a_type_error(dataset: Any) -> None:
    with pytest.raises(TypeError, match="not a dataset of known length"):
        partition(dataset, [0.5, 0.5])


# A part is a dataset.


def test_partition_indexes_like_a_list() -> None:
    part = Partition("abcdef", [4, 1, 3])
    assert len(part) == 3
    assert list(part) == ["e", "b", "d"]
    assert [part[index] for index in (-1, -2, -3)] == ["d", "b", "e"]


def test_partition_iteration_does_not_hide_an_index_that_is_not_in_the_data() -> None:
    with pytest.raises(IndexError):
        list(Partition("abc", [0, 3, 1]))


@pytest.mark.parametrize("index", [3, -4])
def test_partition_index_out_of_range_is_an_index_error(index: int) -> None:
    with pytest.raises(IndexError, match=f"index {index} is out of range for a part of 3"):
        Partition("abcdef", [4, 1, 3])[index]


@pytest.mark.parametrize("seed", [None, 7])
def test_partition_survives_pickling(seed: int | None) -> None:
    for part in partition(list("abcdef"), [0.5, 0.5], seed):
        assert list(pickle.loads(pickle.dumps(part))) == list(part)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_partition_feeds_a_data_loader(num_workers: int) -> None:
    x = torch.arange(20.0).reshape(10, 2)
    part = partition(TensorDataset(x, torch.arange(10)), [4, 6], seed=3)[0]
    batches = list(DataLoader(part, batch_size=3, num_workers=num_workers))
    assert [len(y) for _, y in batches] == [3, 1]
    assert torch.equal(torch.cat([y for _, y in batches]), torch.tensor(part.indices))
    assert torch.equal(torch.cat([x for x, _ in batches]), x[part.indices])


def test_partition_reads_by_the_batch_where_its_dataset_does() -> None:
    part = partition(ByTheBatch(), [5, 5], seed=None)[1]
    assert [batch.tolist() for batch in DataLoader(part, batch_size=3)] == [[5, 6, 7], [8, 9]]


# The tutorial's class.


def test_data_partitioner_uses_the_part_of_a_rank() -> None:
    partitioner = DataPartitioner(range(10), [0.5, 0.5], seed=1)
    expected = partition(range(10), [0.5, 0.5], seed=1)
    assert [list(partitioner.use(rank)) for rank in range(2)] == [list(part) for part in expected]


def test_data_partitioner_has_the_tutorials_sizes() -> None:
    partitioner = DataPartitioner(range(100))
    assert [len(partitioner.use(part)) for part in range(3)] == [70, 20, 10]


@pytest.mark.parametrize("part", [2, -1])
def test_data_partitioner_use_of_no_such_part_is_an_index_error(part: int) -> None:
    with pytest.raises(IndexError, match=f"no part {part} of 2, numbered from 0"):
        DataPartitioner(range(10), [0.5, 0.5]).use(part)
