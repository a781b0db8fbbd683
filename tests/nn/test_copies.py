"""Copies of parallel models: plain models, which train by themselves on each rank."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lockstep
from lockstep.nn import global_hooks
from tests.nn.test_parallelize import net, parts
from tests.ranks import gloo_group, run_ranks


@pytest.fixture(autouse=True)
def nothing_has_been_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(global_hooks, "_groups_by_form", {})
    monkeypatch.setattr(global_hooks, "_warned_forms", set())


SAID = "has the same parameters as a parallel Net, and is not parallel"


def save_and_load(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def train(model: nn.Module, rank: int, num_steps: int = 2) -> None:
    decayed, plain = list(model.parameters())[::2], list(model.parameters())[1::2]
    optimizer = torch.optim.SGD([{"params": decayed, "weight_decay": 0.1}, {"params": plain}], 0.1)
    for _ in range(num_steps):
        optimizer.zero_grad()
        model(parts(2)[rank]).square().mean().backward()
        optimizer.step()


COPIES = [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), save_and_load]


@pytest.mark.parametrize("copied", COPIES)
def test_a_copy_that_is_trained_is_told_of_once(
    copied: Callable[[nn.Module], nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
        model = lockstep.parallelize(net(), process_group=group)
        model = copied(model)  # the first is gone
        train(model, rank)
        model = lockstep.parallelize(model, process_group=group)
        train(model, rank)
        return [p.detach() for p in model.parameters()]

    first, second = run_ranks(2, body)
    assert all(map(torch.equal, first, second))
    assert [SAID in record.getMessage() for record in caplog.records] == [True]


def test_nothing_is_said_of_a_copy_that_is_not_trained(caplog: pytest.LogCaptureFixture) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = lockstep.parallelize(net(), process_group=group)
        average = copy.deepcopy(model)
        train(model, rank)
        average(parts(2)[rank])
        other = nn.Linear(3, 1)
        torch.optim.SGD(other.parameters(), lr=0.1).step()

    run_ranks(2, body)
    assert "parallel" not in caplog.text


@pytest.mark.parametrize("copied", COPIES)
def test_a_copy_is_told_of_at_its_first_backward(
    copied: Callable[[nn.Module], nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    """It may be stepped by hand."""

    def body(rank: int, group: dist.ProcessGroup) -> None:
        trained = copied(lockstep.parallelize(net(), process_group=group))
        again = copied(trained)
        if rank:
            return  # ranks in threads are told once
        trained(parts(2)[rank]).sum().backward()
        assert SAID in caplog.text
        caplog.clear()
        trained(parts(2)[rank]).sum().backward()
        again(parts(2)[rank]).sum().backward()

    run_ranks(2, body)
    assert "parallel" not in caplog.text


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


def test_a_copy_of_a_changed_model_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = lockstep.parallelize(net(), process_group=group)
        model.more = nn.Linear(2, 2)
        model.first.requires_grad_(False)
        copied = copy.deepcopy(model)
        if not rank:
            copied(parts(2)[rank]).sum().backward()
            assert SAID in caplog.text

    run_ranks(2, body)


def test_a_copy_is_told_of_after_a_wrapper_was_replaced(caplog: pytest.LogCaptureFixture) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = net()
        first = lockstep.DistributedDataParallel(model, process_group=group)
        second = lockstep.DistributedDataParallel(model, process_group=group)
        copied = copy.deepcopy(model)
        if not rank:
            copied(parts(2)[rank]).sum().backward()
            assert SAID in caplog.text
        assert first.module is second.module

    run_ranks(2, body)


def test_nothing_is_said_of_copies_in_torchs_wrapper_or_after_the_group(
    caplog: pytest.LogCaptureFixture,
) -> None:
    copies: list[nn.Module] = []

    def body(world: lockstep.World) -> None:
        model = lockstep.parallelize(net())
        copied = copy.deepcopy(model)
        if world.rank:
            copies.append(copied)
            return
        own = nn.parallel.DistributedDataParallel(
            copied, process_group=gloo_group(dist.HashStore(), 0, 1, 20)
        )
        own(parts(2)[0]).sum().backward()

    lockstep.launch(body, 2, ranks="threads")
    gc.collect()
    copies[0](parts(2)[0]).sum().backward()
    assert "parallel" not in caplog.text


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
