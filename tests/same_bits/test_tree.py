"""The order of sums, as a pure function."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lockstep.same_bits import shards_of
from lockstep.same_bits.sums import Node, cover, fold, inner_nodes, split


def text_of(root: Node, values: dict[Node, str]) -> str:
    return fold(root, values, lambda a, b: f"({a}{b})")


def test_the_left_child_is_the_largest_power_of_two() -> None:
    letters = {(each, each + 1): "abcdefg"[each] for each in range(7)}
    assert text_of((0, 7), letters) == "(((ab)(cd))((ef)g))"
    assert split((0, 12)) == 8
    assert split((0, 8)) == 4


@given(st.integers(1, 40), st.data())
def test_ranks_fold_to_the_same_tree(num_shards: int, data: st.DataObject) -> None:
    num_ranks = data.draw(st.integers(1, num_shards))
    root = (0, num_shards)
    leaves = {(each, each + 1): f"{each}," for each in range(num_shards)}
    values, covered = dict[Node, str](), list[int]()
    for rank in range(num_ranks):
        shards = shards_of(rank, num_ranks, num_shards)
        assert len(shards) >= 1
        covered += shards
        for node in cover(shards, root):
            values[node] = text_of(node, leaves)
    assert covered == [*range(num_shards)]
    assert text_of(root, values) == text_of(root, leaves)


def test_a_rank_gives_one_node_if_it_has_one_shard_or_two() -> None:
    for num_ranks in range(1, 33):
        for num_shards in (num_ranks, 2 * num_ranks):
            for rank in range(num_ranks):
                shards = shards_of(rank, num_ranks, num_shards)
                assert len(cover(shards, (0, num_shards))) == 1


def test_there_is_one_addition_less_than_shards() -> None:
    assert all(len(inner_nodes((0, number))) == number - 1 for number in range(1, 40))
