"""Copies of parallel models: plain models, which train by themselves on each rank."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lockstep
from tests.nn.models import saved_and_loaded
from tests.nn.parallel import net, parts
from tests.ranks import run_ranks


def train_in_two_groups(model: nn.Module, rank: int, num_steps: int = 2) -> None:
    decayed, plain = list(model.parameters())[::2], list(model.parameters())[1::2]
    optimizer = torch.optim.SGD([{"params": decayed, "weight_decay": 0.1}, {"params": plain}], 0.1)
    for _ in range(num_steps):
        optimizer.zero_grad()
        model(parts(2)[rank]).square().mean().backward()
        optimizer.step()


COPIES = [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), saved_and_loaded]


@pytest.mark.parametrize("copied", COPIES)
def test_a_copy_can_be_made_parallel(copied: Callable[[nn.Module], nn.Module]) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
        model = copied(lockstep.parallelize(net(), process_group=group))  # the first is gone
        train_in_two_groups(model, rank)
        model = lockstep.parallelize(model, process_group=group)
        train_in_two_groups(model, rank)
        return [p.detach() for p in model.parameters()]

    first, second = run_ranks(2, body)
    assert all(map(torch.equal, first, second))


class Circle(nn.Module):
    """A part that has the whole, too."""

    def __init__(self, whole: nn.Module) -> None:
        super().__init__()
        self.whole = whole
        self.weight = nn.Parameter(torch.ones(3))


class SetLater(nn.Linear):
    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__({})
        self.__dict__.update(state)


def test_models_that_are_copied_part_by_part() -> None:
    def body(_: int, group: dist.ProcessGroup) -> None:
        model = nn.Sequential(nn.Linear(3, 3), SetLater(3, 3))
        model[0].part = Circle(model[0])
        lockstep.parallelize(model, process_group=group)
        for copied in COPIES:
            again = copied(model)
            assert again[0].part.whole is again[0] is not model[0]
            assert torch.equal(again(torch.ones(3)), model(torch.ones(3)))

    run_ranks(2, body)


@pytest.mark.parametrize("copied", COPIES)
def test_a_copy_that_nobody_has_is_gone(copied: Callable[[nn.Module], nn.Module]) -> None:
    def body(_: int, group: dist.ProcessGroup) -> None:
        copy_of_it = copied(lockstep.parallelize(net(), process_group=group))
        parameter = weakref.ref(copy_of_it.first.weight)
        del copy_of_it
        gc.collect()
        assert parameter() is None

    run_ranks(2, body)


class OddParameters(nn.Linear):
    def parameters(self, recurse: object) -> object:
        return super().parameters(recurse)


@pytest.mark.parametrize("other", [nn.LazyLinear(3), OddParameters(3, 3)], ids=["lazy", "odd"])
@pytest.mark.parametrize("copied", COPIES)
def test_any_other_module_can_be_copied(
    copied: Callable[[nn.Module], nn.Module], other: nn.Module
) -> None:
    def body(_: int, group: dist.ProcessGroup) -> None:
        model = lockstep.parallelize(net(), process_group=group)
        assert type(copied(other)) is type(other)
        assert model.training

    run_ranks(2, body)
