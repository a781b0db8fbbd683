"""Parameters of which the ranks of a host have one copy behave as if each rank had its own."""

from __future__ import annotations

import copy
import gc
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import lockstep
from tests.nn.models import Digits
from tests.optim.programs import adamw, losses
from tests.ranks import run_ranks


def test_the_memory_is_given_back() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        for _ in range(3):
            model = lockstep.parallelize(nn.Linear(512, 512), process_group=group)
            optimizer = lockstep.shard_optimizer(adamw(model.parameters()))
            model(torch.ones(1, 512)).sum().backward()
            optimizer.step()
            del model, optimizer
            gc.collect()

    before = num_mapped()
    run_ranks(2, body, backend="shm")
    gc.collect()
    assert num_mapped() == before


def num_mapped() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:lockstep")


def test_aliases_keep_their_values_when_parameters_are_arranged_anew() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = lockstep.parallelize(Digits(), process_group=group)
        optimizer = lockstep.shard_optimizer(adamw([*model.parameters()][:4]))
        alias = model.conv1.weight.detach()
        values = alias.clone()
        optimizer.add_param_group({"params": [*model.parameters()][4:]})
        next(losses(model, rank, 1)).backward()
        optimizer.step()
        assert torch.equal(alias, values) or torch.equal(alias, model.conv1.weight)
        assert alias.any()

    run_ranks(2, body, backend="shm")


def test_nobody_sees_parameters_change_before_his_own_step() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = lockstep.parallelize(Digits(), process_group=group)
        optimizer = lockstep.shard_optimizer(adamw(model.parameters()))
        for loss in losses(model, rank, 5):
            loss.backward()
            before = [parameter.detach().clone() for parameter in model.parameters()]
            time.sleep(0.02 * rank)
            for parameter, old in zip(model.parameters(), before, strict=True):
                assert torch.equal(parameter, old)
            optimizer.step()
            optimizer.zero_grad()

    run_ranks(2, body, backend="shm")


def test_a_rank_sees_what_it_changed_itself_until_the_next_step() -> None:
    first = Digits()

    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = lockstep.parallelize(copy.deepcopy(first), process_group=group)
        optimizer = lockstep.shard_optimizer(adamw(model.parameters()))
        before = [parameter.detach().clone() for parameter in model.parameters()]
        with torch.no_grad():
            model.fc1.weight.fill_(rank + 1.0)
        group.barrier().wait()
        assert (model.fc1.weight == rank + 1.0).all()
        for parameter, old in zip(model.parameters(), before, strict=True):
            assert parameter is model.fc1.weight or torch.equal(parameter, old)
        group.barrier().wait()
        next(losses(model, rank, 1)).backward()
        optimizer.step()
        same = [torch.empty_like(model.fc1.weight) for _ in range(2)]
        group.allgather([same], [model.fc1.weight.detach()]).wait()
        assert torch.equal(*same)

    run_ranks(2, body, backend="shm")


def test_the_values_that_count_are_those_of_the_rank_that_updates_them() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> list[float]:
        model = lockstep.parallelize(nn.Linear(512, 4, bias=False), process_group=group)
        optimizer = lockstep.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.0))
        with torch.no_grad():
            model.weight.fill_(rank)
        model(torch.ones(1, 512)).sum().backward()
        optimizer.step()
        return model.weight.detach()[:, 0].tolist()

    assert run_ranks(2, body, backend="shm") == [[0.0, 0.0, 1.0, 1.0]] * 2


def test_parameters_stay_when_their_optimizer_is_gone() -> None:
    first = Digits()

    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = lockstep.parallelize(copy.deepcopy(first), process_group=group)
        lockstep.shard_optimizer(adamw(model.parameters()))
        gc.collect()
        for a, b in zip(first.parameters(), model.parameters(), strict=True):
            assert torch.equal(a, b)

    run_ranks(2, body, backend="shm")
