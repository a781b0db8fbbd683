"""ZeroRedundancyOptimizer as torch's users know it."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

import lockstep
from tests.nn.models import Digits
from tests.optim.programs import losses, take_steps
from tests.ranks import run_ranks

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZeRO


def zero(model: nn.Module, group: dist.ProcessGroup, **options: Any) -> Any:
    return lockstep.ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, process_group=group, **options
    )


def plain_and_zero(group: dist.ProcessGroup) -> list[Callable[[Any], Optimizer]]:
    return [
        lambda p: torch.optim.AdamW(p, lr=0.01),
        lambda p: lockstep.ZeroRedundancyOptimizer(p, torch.optim.AdamW, group, lr=0.01),
    ]


def assert_equal(a: nn.Module, b: nn.Module) -> None:
    for mine, theirs in zip(a.parameters(), b.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_it_takes_the_steps_of_the_optimizer_in_it(size: int) -> None:
    first = Digits()

    def body(rank: int, group: dist.ProcessGroup) -> None:
        plain = lockstep.parallelize(copy.deepcopy(first), process_group=group)
        take_steps(plain, torch.optim.AdamW(plain.parameters(), lr=0.01), rank)
        model = lockstep.DistributedDataParallel(copy.deepcopy(first), process_group=group)
        model.sample = first.sample
        optimizer = zero(model, group, lr=0.01, parameters_as_bucket_view=True)
        assert isinstance(optimizer, TorchZeRO)
        take_steps(model, optimizer, rank)
        assert_equal(plain, model.module)

    run_ranks(size, body)


def test_it_takes_steps_of_torchs_own_ddp() -> None:
    first = Digits()

    def body(rank: int, group: dist.ProcessGroup) -> None:
        models = []
        for make in plain_and_zero(group):
            model = nn.parallel.DistributedDataParallel(copy.deepcopy(first), process_group=group)
            model.sample = first.sample
            take_steps(model, make(model.parameters()), rank)
            models.append(model.module)
        assert_equal(*models)

    run_ranks(2, body)


def test_its_options_are_those_of_its_groups() -> None:
    first = Digits()

    def body(rank: int, group: dist.ProcessGroup) -> None:
        models = []
        for make in plain_and_zero(group):
            model = lockstep.parallelize(copy.deepcopy(first), process_group=group)
            weight, *others = model.parameters()
            optimizer = make([weight])
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
            optimizer.add_param_group({"params": others, "lr": 0.1})
            scheduler.base_lrs.append(0.1)
            for loss in losses(model, rank, 3):
                loss.backward()
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            assert [each["lr"] for each in optimizer.param_groups] == [0.01 / 8, 0.1 / 8]
            models.append(model)
        assert_equal(*models)

    run_ranks(2, body)


def test_its_state_is_collected_on_one_rank_and_loaded_by_all() -> None:
    first = Digits()
    saved: list[Any] = []

    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = lockstep.parallelize(copy.deepcopy(first), process_group=group)
        optimizer = zero(model, group, lr=0.01)
        take_steps(model, optimizer, 0)
        optimizer.consolidate_state_dict(to=1)
        if rank == 1:
            saved.extend([copy.deepcopy(model), optimizer.state_dict()])
        else:
            with pytest.raises(RuntimeError, match=r"consolidate_state_dict\(to=0\)"):
                optimizer.state_dict()
        group.barrier().wait()
        loaded = lockstep.parallelize(copy.deepcopy(saved[0]), process_group=group)
        optimizer = zero(loaded, group, lr=1.0)
        optimizer.load_state_dict(copy.deepcopy(saved[1]))
        assert optimizer.param_groups[0]["lr"] == 0.01
        take_steps(loaded, optimizer, 0, first=3)
        plain = copy.deepcopy(saved[0])
        optimizer = torch.optim.AdamW(plain.parameters())
        optimizer.load_state_dict(copy.deepcopy(saved[1]))
        take_steps(plain, optimizer, 0, first=3)
        assert_equal(plain, loaded)

    run_ranks(2, body)


def test_ranks_may_leave_the_loop_at_different_times() -> None:
    first = Digits()

    def body(rank: int, group: dist.ProcessGroup) -> None:
        models = []
        for make in plain_and_zero(group):
            model = lockstep.parallelize(copy.deepcopy(first), process_group=group)
            optimizer = make(model.parameters())
            with lockstep.join(model):
                for loss in losses(model, rank, 2 + rank):
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
            models.append(model)
        assert_equal(*models)

    run_ranks(2, body)


def test_bad_arguments_are_told() -> None:
    parameters = [nn.Parameter(torch.ones(2))]
    with pytest.raises(TypeError, match="optimizer_class is"):
        lockstep.ZeroRedundancyOptimizer(parameters, torch.nn.Linear)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="overlap_with_ddp"):
        lockstep.ZeroRedundancyOptimizer(parameters, torch.optim.SGD, overlap_with_ddp=True)
    with pytest.raises(ValueError, match="A parameter is sparse"):
        lockstep.ZeroRedundancyOptimizer([torch.eye(2).to_sparse()], torch.optim.SGD)
    optimizer = lockstep.ZeroRedundancyOptimizer(parameters, torch.optim.SGD)
    with pytest.raises(ValueError, match="no rank 7"):
        optimizer.consolidate_state_dict(to=7)
