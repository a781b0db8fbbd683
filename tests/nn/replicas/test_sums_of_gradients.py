"""Sums of the replicas' gradients: their order, and what they are made of."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lockstep.nn import DataParallel
from lockstep.nn.replicas.replicas import add_up

# Between them the order of a sum shows in its bits.
VALUES = (1.0, 1e8, -1e8)
IN_ORDER = (torch.tensor(VALUES[0]) + VALUES[1] + VALUES[2]).item()
CPU = torch.device("cpu")


def full(*values: float | None) -> list[Any]:
    return [None if value is None else torch.full((2,), float(value)) for value in values]


def parallel(module: nn.Module) -> DataParallel:
    return DataParallel(module, ["cpu"] * 3)


class Scale(nn.Module):
    """Its gradient is the sum of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class InParts(nn.Module):
    """Uses its table in several reentrant checkpoints, each with a gradient of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(8, 8))

    def looked_up(self, x: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x) * F.embedding(words, self.table, sparse=True)

    def multiplied(self, x: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.table)

    def forward(self, words: torch.Tensor, order: str) -> torch.Tensor:
        x = torch.ones(len(words), 8, requires_grad=True)
        for kind in order:
            use = {"d": self.multiplied, "s": self.looked_up}[kind]
            x = checkpoint(use, x, words, use_reentrant=True)
        return x


class WithBackward(Scale):
    """Runs a backward of its own in each forward and backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            (1e3 * self.weight).sum().backward()
        self.weight.grad = None
        return super().forward(x)


def test_a_sum_is_in_the_order_of_the_replicas() -> None:
    module = Scale()
    model = parallel(module)
    for _ in range(2):
        module.weight.grad = None
        model(torch.tensor(VALUES)).sum().backward()
        assert module.weight.grad.item() == IN_ORDER != sum(VALUES)


@pytest.mark.parametrize("order", ["dd", "sd", "ds", "ss", "dsds"])
def test_gradients_that_come_in_parts(order: str) -> None:
    """Dense ones, sparse ones, and both."""
    module, words = InParts(), torch.tensor([3, 1, 4, 1, 5, 2])
    parallel(module)(words, order).sum().backward()
    alone = [copy.deepcopy(module) for _ in range(3)]
    for one, part in zip(alone, words.chunk(3), strict=True):
        one.table.grad = None
        one(part, order).sum().backward()
    first, second, third = (one.table.grad.to_dense() for one in alone)
    torch.testing.assert_close(module.table.grad.to_dense(), first + second + third)


def test_a_backward_of_the_modules_own_is_not_the_callers() -> None:
    module = WithBackward()
    parallel(module)(torch.tensor(VALUES)).sum().backward()
    assert module.weight.grad.item() == IN_ORDER


def test_a_sum_does_not_share_memory_with_other_replicas() -> None:
    other = full(10, 10)
    first, second = add_up([full(None, 1), other], CPU)
    other[0].zero_()
    assert (first[0].item(), second[0].item()) == (10, 11)


def test_sparse_gradients_are_added_to_dense_ones() -> None:
    sparse = torch.tensor([0.0, 5.0]).to_sparse()
    for parts in ([[sparse], full(10)], [full(10), [sparse]]):
        (total,) = add_up(parts, CPU)
        assert total.tolist() == [10, 15]


class Elsewhere(torch.Tensor):
    """As if on another device; ``num_most`` copies of all have been here at the same time."""

    num_here = num_most = 0

    def to(self, *_: object, **__: object) -> Any:
        here = self.as_subclass(torch.Tensor).clone()
        weakref.finalize(here, self._count, -1)
        self._count(1)
        return here

    @staticmethod
    def _count(change: int) -> None:
        Elsewhere.num_here += change
        Elsewhere.num_most = max(Elsewhere.num_most, Elsewhere.num_here)


def test_gradients_of_one_replica_at_a_time_come_to_the_first_device() -> None:
    others = [
        [torch.full((2,), value).as_subclass(Elsewhere) for _ in range(5)] for value in VALUES
    ]
    total = add_up([full(1, 2, 3, 4, 5), *others], CPU)
    assert total[1].tolist() == [float(torch.tensor(2.0) + 1.0 + 1e8 - 1e8)] * 2
    # The next one's first may come before the last of the one before is gone.
    assert 5 <= Elsewhere.num_most <= 6
