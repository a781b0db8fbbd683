"""The order in which the gradients of a step's shards are added up, whatever the number of ranks.

A node ``(first, stop)`` is the sum over the shards from ``first`` to ``stop - 1``. Its left child
has the largest power of two of them that is less than all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

Node = tuple[int, int]
T = TypeVar("T")


def split(node: Node) -> int:
    """Return where the right child of ``node`` begins, which has two shards at least."""
    first, stop = node
    return first + (1 << ((stop - first - 1).bit_length() - 1))


def shards_of(rank: int, num_ranks: int, num_shards: int) -> range:
    """Return the shards that ``rank`` computes, which follow each other."""
    return range(rank * num_shards // num_ranks, (rank + 1) * num_shards // num_ranks)


def cover(shards: range, root: Node) -> list[Node]:
    """Return the largest nodes of the tree below ``root`` that lie in ``shards``, in their order.

    Their sums are what a rank gives to the others: one if the number of shards is the number of
    ranks, or twice that.
    """
    first, stop = root
    if shards.start <= first and stop <= shards.stop:
        return [root]
    if stop <= shards.start or shards.stop <= first:
        return []
    middle = split(root)
    return [*cover(shards, (first, middle)), *cover(shards, (middle, stop))]


def fold(root: Node, values: Mapping[Node, T], add: Callable[[T, T], T]) -> T:
    """Return the value of ``root`` from ``values`` of nodes that cover it."""
    if root in values:
        return values[root]
    first, stop = root
    middle = split(root)
    left = fold((first, middle), values, add)
    return add(left, fold((middle, stop), values, add))


def inner_nodes(root: Node) -> set[Node]:
    """Return ``root`` and all nodes below it that aren't single shards."""
    first, stop = root
    if stop - first < 2:
        return set()
    middle = split(root)
    return {root} | inner_nodes((first, middle)) | inner_nodes((middle, stop))
