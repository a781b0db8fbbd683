"""Bucket assignment is a pure function; these are its laws."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lockstep.grad import assign_buckets

SIZES = st.lists(st.integers(0, 100), min_size=1, max_size=60)


@given(SIZES, st.integers(1, 3), st.integers(1, 200), st.randoms(use_true_random=False))
def test_every_gradient_is_in_one_bucket_of_its_kind_within_the_cap(sizes, num_kinds, cap, rng):
    kinds = [rng.randrange(num_kinds) for _ in sizes]
    order = list(range(len(sizes)))
    rng.shuffle(order)
    buckets = assign_buckets(sizes, kinds, order, cap_bytes=cap, first_cap_bytes=cap // 2)
    assert sorted(index for bucket in buckets for index in bucket) == sorted(order)
    place = {index: position for position, index in enumerate(order)}
    for bucket in buckets:
        assert len({kinds[index] for index in bucket}) == 1
        assert len(bucket) == 1 or sum(sizes[index] for index in bucket[:-1]) < cap
        assert [place[index] for index in bucket] == sorted(place[index] for index in bucket)
    ends = [place[bucket[-1]] for bucket in buckets]
    assert ends == sorted(ends)


def test_first_bucket_is_smaller():
    assert assign_buckets(
        [4] * 6, ["float32"] * 6, [5, 4, 3, 2, 1, 0], cap_bytes=12, first_cap_bytes=4
    ) == [[5], [4, 3, 2], [1, 0]]
    assert assign_buckets(
        [4] * 6, ["float32"] * 6, [5, 4, 3, 2, 1, 0], cap_bytes=100, first_cap_bytes=6
    ) == [[5, 4], [3, 2, 1, 0]]


def test_few_gradients_share_one_bucket():
    assert assign_buckets(
        [4] * 6, ["float32"] * 6, [5, 4, 3, 2, 1, 0], cap_bytes=100, first_cap_bytes=7
    ) == [[5, 4, 3, 2, 1, 0]]


def test_first_bucket_is_never_larger_than_the_others_may_be():
    assert assign_buckets([4] * 4, [0] * 4, range(4), cap_bytes=4, first_cap_bytes=100) == [
        [0],
        [1],
        [2],
        [3],
    ]


def test_a_gradient_above_the_cap_takes_along_what_is_there():
    assert assign_buckets([1, 100, 1], [0] * 3, range(3), cap_bytes=10) == [[0, 1], [2]]


def test_the_first_buckets_may_have_caps_of_their_own():
    """The last of them is that of all that follow; there is no smaller first one then."""
    for caps, expected in (
        ([8, 4], [[5, 4], [3], [2], [1], [0]]),
        ([4, 12, 8], [[5], [4, 3, 2], [1, 0]]),
        ([24], [[5, 4, 3, 2, 1, 0]]),
    ):
        order = [5, 4, 3, 2, 1, 0]
        assert assign_buckets([4] * 6, [0] * 6, order, cap_bytes=caps, first_cap_bytes=1) == (
            expected
        )


def test_kinds_never_mix():
    kinds = ["float32", "float64", "float32", "float64"]
    assert assign_buckets([1] * 4, kinds, range(4), cap_bytes=10) == [[0, 2], [1, 3]]
