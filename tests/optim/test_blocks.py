"""Every element is one rank's, and ranks have about as many."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from lockstep.optim.blocks import Blocks, cut_evenly, keep_whole, pieces_of

SIZES = st.lists(st.integers(0, 5000), min_size=1, max_size=20)
RANKS = st.integers(1, 7)


def check_owned_once(blocks: Blocks, numels: list[int], num_ranks: int) -> None:
    """No two parameters overlap, and the pieces of all ranks are all elements."""
    owned = [[0] * numel for numel in numels]
    for rank in range(num_ranks):
        begin, end = rank * blocks.size, (rank + 1) * blocks.size
        places = []
        for index, start, stop in pieces_of(blocks, numels, rank):
            first = blocks.offsets[index] + start
            assert begin <= first
            assert first + stop - start <= end
            places.append((first, first + stop - start))
            for element in range(start, stop):
                owned[index][element] += 1
        assert all(a[1] <= b[0] for a, b in pairwise(places))
    assert all(count == 1 for counts in owned for count in counts)


@given(numels=SIZES, num_ranks=RANKS)
def test_blocks_are_equal_parts_of_all_elements(numels: list[int], num_ranks: int) -> None:
    blocks = cut_evenly(numels, num_ranks)
    check_owned_once(blocks, numels, num_ranks)
    assert list(blocks.offsets) == sorted(blocks.offsets)
    assert blocks.size * num_ranks < sum(numels) + 64 * (len(numels) + num_ranks)


@given(numels=SIZES, num_ranks=RANKS)
def test_whole_parameters_are_one_ranks_and_balanced(numels: list[int], num_ranks: int) -> None:
    blocks = keep_whole(numels, num_ranks)
    check_owned_once(blocks, numels, num_ranks)
    pieces = [piece for rank in range(num_ranks) for piece in pieces_of(blocks, numels, rank)]
    assert sorted(pieces) == [(index, 0, numel) for index, numel in enumerate(numels)]
    padded = [-(-max(numel, 1) // 64) * 64 for numel in numels]
    assert blocks.size <= sum(padded) / num_ranks + max(padded) * (1 - 1 / num_ranks)


def test_parameters_begin_at_cache_lines() -> None:
    assert cut_evenly([1, 65, 64], 2) == Blocks((0, 64, 192), 128)


def test_a_parameter_is_cut_where_a_block_ends() -> None:
    assert pieces_of(cut_evenly([256], 2), [256], 0) == [(0, 0, 128)]
    assert pieces_of(cut_evenly([256], 2), [256], 1) == [(0, 128, 256)]


def test_the_largest_parameters_are_divided_among_the_ranks_first() -> None:
    numels = [64, 640, 64, 640]
    pieces = [pieces_of(keep_whole(numels, 2), numels, rank) for rank in (0, 1)]
    owned = [sorted(piece.parameter for piece in local) for local in pieces]
    assert sorted(owned) == [[0, 1], [2, 3]]
