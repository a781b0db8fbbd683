"""average_gradients(): the mean over ranks, by hand."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lockstep
from lockstep import errors
from tests.nn.models import MODELS, build
from tests.ranks import run_ranks


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("sizes", [[12], [6, 6], [5, 0, 7], [9, 1, 1, 1]], ids=str)
def test_weighted_mean_is_the_gradient_of_one_process(name: str, sizes: list[int]) -> None:
    model = build(name)
    batch = torch.randn(12, *model.sample, dtype=torch.float64)
    oracle = copy.deepcopy(model)
    oracle(batch).square().sum(1).mean().backward()

    def body(rank: int, group: dist.ProcessGroup) -> list:
        mine = copy.deepcopy(model)
        part = batch.split(sizes)[rank]
        mine(part).square().sum(1).mean().backward()
        lockstep.average_gradients(mine, weight=len(part), process_group=group)
        return [p.grad for p in mine.parameters()]

    for gradients in run_ranks(len(sizes), body):
        for mine, theirs in zip(gradients, oracle.parameters(), strict=True):
            assert (mine is None) == (theirs.grad is None)
            if mine is not None:
                slack = 1e-10 if mine.dtype in (torch.float64, torch.complex128) else 1e-5
                torch.testing.assert_close(mine, theirs.grad, rtol=slack, atol=slack)


def test_without_weight_all_ranks_count_the_same() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> list:
        model = nn.Linear(1, 1)
        model.weight.grad = torch.full((1, 1), float(rank))
        if rank == 2:
            model.bias.grad = torch.full((1,), 6.0)
        lockstep.average_gradients(model, process_group=group)
        return [model.weight.grad.item(), model.bias.grad.item()]

    assert run_ranks(3, body) == [[1.0, 2.0]] * 3


def test_called_twice_it_changes_nothing_more() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> float:
        model = nn.Linear(1, 1, bias=False)
        model.weight.grad = torch.full((1, 1), float(rank))
        for _ in range(2):
            lockstep.average_gradients(model, process_group=group)
        return model.weight.grad.item()

    assert run_ranks(2, body) == [0.5, 0.5]


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf")])
def test_a_weight_that_is_no_number_of_samples_is_refused(weight: float) -> None:
    with pytest.raises(ValueError, match="number of samples"):
        lockstep.average_gradients(nn.Linear(1, 1), weight=weight)


@pytest.mark.parametrize("size", [1, 2])
def test_no_samples_anywhere_is_refused_on_every_rank(size: int) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        with pytest.raises(ValueError, match="Every rank gave a weight of 0"):
            lockstep.average_gradients(nn.Linear(1, 1), weight=0, process_group=group)

    run_ranks(size, body)


def test_a_rank_of_weight_0_counts_for_nothing_even_if_it_has_nan() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> float:
        model = nn.Linear(1, 1, bias=False)
        model.weight.grad = torch.full((1, 1), float("nan") if rank == 0 else 3.0)
        lockstep.average_gradients(model, weight=rank, process_group=group)
        return model.weight.grad.item()

    assert run_ranks(3, body) == [3.0] * 3


def test_another_model_on_one_rank_is_named() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        with pytest.raises(errors.ModelMismatch, match=r"'weight' is .*\(1, 2\).* on rank 1"):
            lockstep.average_gradients(nn.Linear(1 + rank, 1), process_group=group)

    run_ranks(2, body)


def test_a_model_is_compared_with_those_of_each_group() -> None:
    def body(world: lockstep.World) -> None:
        pair = dist.new_group([0, 1])
        model = nn.Linear(2 if world.rank == 2 else 1, 1)
        if world.rank < 2:
            lockstep.average_gradients(model, process_group=pair)
        with pytest.raises(errors.ModelMismatch, match="on rank 2"):
            lockstep.average_gradients(model)

    lockstep.launch(body, 3, ranks="threads")


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(TypeError, match=r"not a torch\.nn\.Module"):
        lockstep.average_gradients([torch.ones(1)])
