"""What replicas' processes leave, and how the caller adds it up, in one process here."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.nn.replicas.gradients import Gradients, GradientsElsewhere, LeftGradients, add_up

# Between them the order of a sum shows in its bits.
VALUES = (1.0, 1e8, -1e8)


class Process:
    """A replica's end: parameters of its own, and what is told when a backward is over."""

    def __init__(self, elsewhere: GradientsElsewhere, number: int) -> None:
        self.parameters = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
        self.left = LeftGradients(elsewhere.shared[number].here)
        for index, parameter in enumerate(self.parameters):
            self.left.take_from(index, parameter)
        self.left.is_taking = True

    def derive(self, index: int, value: float) -> None:
        (self.parameters[index] * value).sum().backward()

    def over(self) -> tuple[bytes, dict[int, torch.Tensor]]:
        rest = {i: p.grad for i, p in enumerate(self.parameters) if p.grad is not None}
        for parameter in self.parameters:
            parameter.grad = None
        return self.left.taken(), rest


def team() -> tuple[GradientsElsewhere, list[Process]]:
    """The caller's end for two processes, and theirs."""
    elsewhere = GradientsElsewhere([torch.zeros(2) for _ in range(3)], 2)
    processes = [Process(elsewhere, number) for number in range(2)]
    return elsewhere, processes


def of_first(*values: float | None) -> Gradients:
    return [None if value is None else torch.full((2,), float(value)) for value in values]


def total(elsewhere: GradientsElsewhere, mine: Gradients, processes: list[Process]) -> Gradients:
    """The sum when all are through."""
    rests = [elsewhere.rest(number, *one.over()) for number, one in enumerate(processes)]
    parts = [first for first, _ in rests] + [later for _, later in rests]
    return add_up([mine, *parts], torch.device("cpu"))


def test_what_is_there_is_added_once() -> None:
    elsewhere, processes = team()
    for _ in range(2):
        elsewhere.begin()
        mine = of_first(1, 1, 1)
        processes[0].derive(0, 10)
        processes[0].derive(1, 10)
        processes[1].derive(1, 100)
        elsewhere.add_those_there(mine)
        assert [g[0].item() for g in mine] == [11, 111, 1]
        processes[0].derive(2, 10)
        sums = total(elsewhere, mine, processes)
        assert [g[0].item() for g in sums] == [11, 111, 11]


@pytest.mark.parametrize("comes_first", [0, 1])
def test_the_order_of_a_sum_is_that_of_the_replicas(comes_first: int) -> None:
    elsewhere, processes = team()
    elsewhere.begin()
    mine = of_first(*VALUES[:1], 0, 0)
    for number in (comes_first, 1 - comes_first):
        processes[number].derive(0, VALUES[1 + number])
        elsewhere.add_those_there(mine)
    in_order = torch.tensor(VALUES[0]) + VALUES[1] + VALUES[2]
    assert total(elsewhere, mine, processes)[0][0] == in_order != sum(VALUES)


def test_a_gradient_that_comes_in_parts_is_added_whole() -> None:
    elsewhere, processes = team()
    for is_added_early in (True, False):
        elsewhere.begin()
        mine = of_first(1, 1, 1)
        processes[0].derive(0, 10)
        if is_added_early:
            elsewhere.add_those_there(mine)
        processes[0].derive(0, 20)
        processes[0].derive(0, 30)
        assert total(elsewhere, mine, processes)[0][0] == 61


def test_the_order_of_parts_does_not_depend_on_when_they_come() -> None:
    """0.1 + 0.2 + 0.3 isn't 0.1 + (0.2 + 0.3)."""
    sums = set()
    for is_added_early in (True, False):
        elsewhere, processes = team()
        elsewhere.begin()
        mine = of_first(0.1, 1, 1)
        processes[0].derive(0, 0.2)
        if is_added_early:
            elsewhere.add_those_there(mine)
        processes[0].derive(0, 0.3)
        processes[1].derive(0, 1e-8)
        sums.add(total(elsewhere, mine, processes)[0][0].item())
    one = torch.ones(())
    assert sums == {(0.1 * one + 0.2 * one + 1e-8 * one + 0.3 * one).item()}


def test_what_the_first_has_no_gradient_of_is_not_kept_in_their_memory() -> None:
    elsewhere, processes = team()
    elsewhere.begin()
    mine = of_first(None, 1, 1)
    for number, one in enumerate(processes):
        one.derive(0, 10 + number)
    elsewhere.add_those_there(mine)
    sums = total(elsewhere, mine, processes)
    elsewhere.begin()
    processes[0].derive(0, 500)
    assert sums[0][0] == 21


def test_sparse_gradients_are_left_to_the_end() -> None:
    elsewhere, processes = team()
    elsewhere.begin()
    mine = of_first(1, 1, 1)
    mine[0] = torch.tensor([0.0, 5.0]).to_sparse()
    processes[0].derive(0, 10)
    elsewhere.add_those_there(mine)
    assert total(elsewhere, mine, processes)[0].to_dense().tolist() == [10, 15]


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
    others: list[Gradients] = [
        [torch.full((2,), value).as_subclass(Elsewhere) for _ in range(5)] for value in VALUES
    ]
    total = add_up([of_first(1, 2, 3, 4, 5), *others], torch.device("cpu"))
    assert total[1].tolist() == [float(torch.tensor(2.0) + 1.0 + 1e8 - 1e8)] * 2
    # The next one's first may come before the last of the one before is gone.
    assert 5 <= Elsewhere.num_most <= 6


def test_a_backward_of_the_modules_own_is_not_taken() -> None:
    elsewhere, processes = team()
    elsewhere.begin()
    processes[0].left.is_taking = False
    processes[0].derive(0, 10)
    assert processes[0].parameters[0].grad is not None
    assert processes[0].left.taken() == bytes(3)
