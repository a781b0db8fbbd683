"""Sharded optimizers whose ranks are on several hosts."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import lockstep
from lockstep.checkpoint import ShardedState
from tests.comm.ranks_on_hosts import noted_sends, run_hosts
from tests.nn.models import Digits
from tests.optim.optimizers import OPTIMIZERS
from tests.optim.programs import trained


def test_parameters_have_the_bits_of_an_unsharded_optimizer() -> None:
    torch.manual_seed(0)
    first: nn.Module = Digits()

    def body(rank: int, group: dist.ProcessGroup) -> None:
        for name in "AdamW", "Adafactor":
            ends = [trained(group, first, OPTIMIZERS[name], sharded=each)[0] for each in (0, 1)]
            plain, sharded = (each.parameters() for each in ends)
            for a, b in zip(plain, sharded, strict=True):
                assert torch.equal(a, b)

    run_hosts([[0, 1], [2, 3]], body)
    run_hosts([[0, 1], [2]], body)


@pytest.mark.parametrize("hosts", [[[0, 1], [2, 3]], [[0, 1], [2]]])
def test_a_checkpoint_of_several_hosts_is_loaded_on_one_rank(
    hosts: list[list[int]], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    first: nn.Module = Digits()

    def body(rank: int, group: dist.ProcessGroup) -> dict[str, Any]:
        model, optimizer = trained(group, first, OPTIMIZERS["AdamW"], sharded=True)
        lockstep.save(tmp_path, model=model, optimizer=optimizer, process_group=group)
        return optimizer.state_dict()

    states: Any = run_hosts(hosts, body)
    model = Digits()
    optimizer = torch.optim.AdamW(model.parameters())
    lockstep.load(tmp_path, model=model, optimizer=optimizer)
    loaded = optimizer.state_dict()["state"]
    for state in states:
        for index, entry in state["state"].items():
            for name, value in entry.items():
                assert torch.equal(value, loaded[index][name])


@pytest.mark.parametrize("hosts", [[[0, 1], [2, 3]], [[0, 1], [2]]])
def test_parts_of_several_hosts_are_one_checkpoint(hosts: list[list[int]]) -> None:
    """What torch.distributed.checkpoint plans: it refuses chunks that overlap or leave a gap."""
    torch.manual_seed(0)
    first: nn.Module = Digits()

    def body(rank: int, group: dist.ProcessGroup) -> tuple[Any, Any]:
        _, optimizer = trained(group, first, OPTIMIZERS["AdamW"], sharded=True)
        planner = DefaultSavePlanner()
        planner.set_up_planner({"optimizer": ShardedState(optimizer).state_dict()}, None, not rank)
        local = planner.create_local_plan()
        return optimizer.state_dict(), (local, [*map(planner.resolve_data, local.items)])

    answers = run_hosts(hosts, body)
    states, plans = zip(*answers, strict=True)
    planner = DefaultSavePlanner()
    _, metadata = planner.create_global_plan([local for local, _ in plans])
    chunks = {
        (item.index.fqn, item.index.offset): value
        for local, values in plans
        for item, value in zip(local.items, values, strict=True)
    }
    for index, entry in states[0]["state"].items():
        for name, value in entry.items():
            key = f"optimizer.state.{index}.{name}"
            for chunk in metadata.state_dict_metadata[key].chunks:
                place = tuple(map(lambda o, s: slice(o, o + s), chunk.offsets, chunk.sizes))
                assert torch.equal(value[place], chunks[key, chunk.offsets])


def test_hosts_of_equally_many_ranks_send_each_other_gradients_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent, together = noted_sends(monkeypatch), threading.Barrier(4)

    def body(rank: int, group: dist.ProcessGroup) -> None:
        torch.manual_seed(0)
        model = lockstep.parallelize(Digits(), process_group=group)
        optimizer = lockstep.shard_optimizer(torch.optim.AdamW(model.parameters()))
        for _ in range(2):
            model(torch.rand(2, *Digits.sample)).sum().backward()
            together.wait(20)
            sent.clear()
            together.wait(20)
            optimizer.step()
            together.wait(20)
            assert not sent
            together.wait(20)

    run_hosts([[0, 1], [2, 3]], body)
