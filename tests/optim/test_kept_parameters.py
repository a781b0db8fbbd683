"""Tensors that share memory with parameters of a sharded optimizer, before and after it is."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lockstep
from lockstep.errors import CollectiveMismatch
from tests.counts import pairs
from tests.nn.parallel import net, parts
from tests.ranks import Backend, run_ranks
from tests.same import assert_same

Values = list[torch.Tensor]


def keep_data(parameters: list[nn.Parameter], step: int, kept: Values) -> None:
    """As of weights that are averaged by swapping."""
    kept += [p.data for p in parameters]
    for parameter in parameters:
        parameter.data = 1.5 * parameter.data


def set_kept(parameters: list[nn.Parameter], step: int, kept: Values) -> None:
    new = [1.5 * p.data for p in parameters]
    kept += new
    for parameter, value in zip(parameters, new, strict=True):
        parameter.data = value


def swap_and_back(parameters: list[nn.Parameter], step: int, kept: Values) -> None:
    values = [p.data for p in parameters]
    kept += values
    for parameter in parameters:
        parameter.data = torch.zeros_like(parameter)
    for parameter, value in zip(parameters, values, strict=True):
        parameter.data = value


def alias(parameters: list[nn.Parameter], step: int, kept: Values) -> None:
    """Before the optimizer is sharded."""
    if step == 0:
        kept += [parameters[0].data, parameters[1].detach().view(-1)]


def share_memory(parameters: list[nn.Parameter], step: int, kept: Values) -> None:
    """As for actors in other processes, which have the same memory."""
    if step == 0:
        kept.append(parameters[0].data.share_memory_())


def train_with_changes(
    model: nn.Module, x: torch.Tensor, change: Callable, shard: Callable[[torch.optim.SGD], object]
) -> Values:
    parameters, kept, seen = list(model.parameters()), [], []
    change(parameters, 0, kept)
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    shard(optimizer)
    for step in range(1, 5):
        if step % 2 == 0:
            change(parameters, step, kept)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        seen += [tensor.detach().clone() for tensor in [*kept, *parameters]]
    return seen


CHANGES = [keep_data, set_kept, swap_and_back, alias, share_memory]
BACKENDS = ["threads", "shm", "gloo"]


@pairs("change, backend", CHANGES, BACKENDS)
def test_tensors_with_memory_of_parameters_are_as_in_one_process(
    change: Callable, backend: str
) -> None:
    expected = train_with_changes(net(), parts(2).flatten(0, 1), change, lambda optimizer: None)

    def body(rank: int, group: dist.ProcessGroup) -> Values:
        model = lockstep.parallelize(copy.deepcopy(net()), process_group=group)
        return train_with_changes(
            model,
            parts(2)[rank],
            change,
            lockstep.shard_optimizer,
        )

    for seen in run_ranks(2, body, backend=backend):
        assert_same(seen, expected)


def test_parameters_that_share_memory_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = lockstep.parallelize(copy.deepcopy(net()), process_group=group)
        kept = model.state_dict() if rank == 1 else None
        lockstep.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        del kept

    run_ranks(2, body)
    assert "share their memory with another tensor" in caplog.text


@pytest.mark.parametrize("backend", ["threads", "shm"])
def test_data_that_one_rank_alone_replaces_is_named_on_all(backend: Backend) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = lockstep.parallelize(net(), process_group=group)
        optimizer = lockstep.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(3):
            model.zero_grad()
            model(parts(2)[rank]).square().mean().backward()
            if step == 2 and rank == 1:
                model.first.weight.data = model.first.weight.data.clone()
            if step < 2:
                optimizer.step()
        with pytest.raises(CollectiveMismatch, match=r"move of 'first.weight' back, whose data"):
            optimizer.step()

    run_ranks(2, body, backend=backend)
