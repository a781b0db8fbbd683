"""Sums of gradients over a rank's shards in the order of a tree, whatever the number of ranks.

A node ``(first, stop)`` is the sum over the shards from ``first`` to ``stop - 1``. Its left child
has the largest power of two of them that is less than all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch

from lockstep.nn import Number
from lockstep.torch_private import _foreach_add_, _foreach_mul_

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


# Gradients by parameter; None for one without.
Gradients = list[torch.Tensor | None]


def scale(gradients: Sequence[torch.Tensor], weight: Number | None) -> None:
    """Multiply ``gradients`` by ``weight``, in place; by none, if it is None."""
    if isinstance(weight, torch.Tensor):
        for gradient in gradients:
            factor = weight.to(gradient.device)
            if gradient.itemsize < 4:  # which would round the weight too
                gradient.copy_(gradient.float() * factor)
            else:
                gradient.mul_(factor)
    elif weight is not None and weight != 1 and gradients:
        _foreach_mul_([*gradients], weight)


def add(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Add ``right`` to ``left``, in place, and return it."""
    return left.add_(right)


class LocalSums:
    """Adds up the gradients of a rank's shards as they come, siblings of the tree at once.

    It needs as many additions as plain accumulation has, and memory for a set of gradients for each
    node that waits for its sibling: one more than accumulation if a rank has two shards. Those of
    the last shard are added where they are copied to, or by :meth:`whole`.

    Args:
        num_shards: The number of all shards.
        shards: Those of this rank.
    """

    def __init__(self, num_shards: int, shards: range) -> None:
        root = (0, num_shards)
        self._inner = {
            (first, stop)
            for first, stop in inner_nodes(root)
            if shards.start <= first and stop <= shards.stop
        }
        self._last, self._next = shards.stop - 1, shards.start
        self._nodes = cover(shards, root)
        self._stack: list[tuple[Node, Gradients]] = []

    def add(self, shard: int, gradients: Gradients) -> None:
        """Add the ``gradients`` of the next shard that has some, which may be changed."""
        self.come_to(shard, len(gradients))
        self._next = shard + 1
        self._stack.append(((shard, shard + 1), gradients))
        if shard < self._last:
            self._add_siblings()

    def come_to(self, shard: int, num_parameters: int) -> None:
        """Add shards without gradients, until ``shard`` is the next one."""
        while self._next < shard:
            self.add(self._next, [None] * num_parameters)

    def _add_siblings(self) -> None:
        while len(self._stack) > 1:
            ((first, _), left), ((_, stop), right) = self._stack[-2:]
            if (first, stop) not in self._inner:
                return
            self._stack[-2:] = [((first, stop), _sum(left, right))]

    def terms(self) -> list[list[Gradients]]:
        """Return, for each of the largest nodes, what is to be added up, from the last one on."""
        return [
            [its for (first, stop), its in self._stack if node[0] <= first and stop <= node[1]]
            for node in self._nodes
        ]

    def whole(self) -> Gradients:
        """Return the sum of all shards, if this rank has them all, after the last one."""
        self._add_siblings()
        ((_, total),) = self._stack
        return total


def _sum(left: Gradients, right: Gradients) -> Gradients:
    pairs = [(a, b) for a, b in zip(left, right, strict=True) if a is not None and b is not None]
    if pairs:
        _foreach_add_([a for a, _ in pairs], [b for _, b in pairs])
    return [b if a is None else a for a, b in zip(left, right, strict=True)]
