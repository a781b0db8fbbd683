"""torch's GradScaler skips the same steps on all ranks, and has the same scale."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

import lockstep
from lockstep.errors import RankFailed
from tests.nn.parallel import net, parts

OVERFLOWS = 2  # the step


def scaler() -> Any:
    return torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)


def scales(rank: int, optimizer: Any, model: nn.Module, extra: nn.Parameter, how: str) -> list[Any]:
    """Let a gradient of one rank's own parameter overflow; return scales and skipped steps."""
    amp, found = scaler(), []
    for step in range(5):
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.zero_grad()
        loss = model(parts(2)[rank].float()).square().mean()
        if rank == 1:
            loss = loss + extra * (float("inf") if step == OVERFLOWS else 1.0)
        amp.scale(loss).backward()
        if how == "unscale":
            amp.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        amp.step(optimizer)
        amp.update()
        is_skipped = all(map(torch.equal, before, model.parameters()))
        found.append((amp.get_scale(), is_skipped))
    return found


def values(model: nn.Module) -> list[Any]:
    return [parameter.tolist() for parameter in model.parameters()]


EXPECTED = [(8.0, False), (16.0, False), (8.0, True), (8.0, False), (16.0, False)]


@pytest.mark.parametrize("how", ["step", "unscale"])
@pytest.mark.parametrize("sharded", [False, True])
def test_a_parameter_of_one_rank_alone_lets_all_ranks_skip(sharded: bool, how: str) -> None:
    def body(world: lockstep.World) -> list[Any]:
        model = lockstep.parallelize(net().float())
        extra = nn.Parameter(torch.tensor(1.0))
        optimizer = SGD([*model.parameters(), *[extra] * (world.rank == 1)], 0.1)
        optimizer = lockstep.shard_optimizer(optimizer) if sharded else optimizer
        assert scales(world.rank, optimizer, model, extra, how) == EXPECTED
        return values(model)

    first, second = lockstep.launch(body, nprocs=2, ranks="threads")
    assert first == second


@pytest.mark.parametrize("sharded", [False, True])
def test_ranks_in_join_skip_the_same_steps(sharded: bool) -> None:
    def body(world: lockstep.World) -> list[Any]:
        model = lockstep.parallelize(net().float())
        extra = nn.Parameter(torch.tensor(1.0))
        optimizer = SGD([*model.parameters(), *[extra] * (world.rank == 1)], 0.1)
        optimizer = lockstep.shard_optimizer(optimizer) if sharded else optimizer
        amp, scales = scaler(), []
        with lockstep.join(model):
            for step in range(4 if world.rank else 6):
                optimizer.zero_grad()
                loss = model(parts(2)[world.rank].float()).square().mean()
                if world.rank:
                    loss = loss + extra * (float("inf") if step == OVERFLOWS else 1.0)
                amp.scale(loss).backward()
                amp.step(optimizer)
                amp.update()
                scales.append(amp.get_scale())
        assert scales[:4] == [scale for scale, _ in EXPECTED[:4]]
        return values(model)

    first, second = lockstep.launch(body, nprocs=2, ranks="threads")
    assert first == second


def test_a_rank_without_any_gradient_takes_part() -> None:
    def body(world: lockstep.World) -> tuple[Any, float]:
        model, amp = lockstep.parallelize(net().float()), scaler()
        optimizer = SGD(model.parameters(), 0.1)
        extra = torch.ones((), requires_grad=True)
        for step in range(4):
            optimizer.zero_grad()
            loss = model(parts(2)[0].float()).square().mean() if world.rank else extra * 1.0
            factor = float("inf") if step == OVERFLOWS else 1.0
            amp.scale(loss * factor).backward()
            amp.step(optimizer)
            amp.update()
        return values(model), amp.get_scale()

    first, second = lockstep.launch(body, nprocs=2, ranks="threads")
    assert first == second == (first[0], 8.0)


def test_scales_that_differ_are_refused_before_the_step() -> None:
    def body(world: lockstep.World) -> None:
        model, probe = lockstep.parallelize(net().float()), nn.Linear(4, 1)
        optimizer, others = SGD(model.parameters(), 0.1), SGD(probe.parameters(), 0.1)
        amp = scaler()
        for step in range(2):
            optimizer.zero_grad()
            amp.scale(model(parts(2)[world.rank].float()).square().mean()).backward()
            amp.step(optimizer)
            if world.rank == 0 and step == 0:
                amp.scale(probe(parts(2)[0].float()).sum() * float("inf")).backward()
                amp.step(others)
            amp.update()

    with pytest.raises(RankFailed, match=r"is 4\.0 on one rank and 8\.0 on another.*of its own"):
        lockstep.launch(body, nprocs=2, ranks="threads")


def test_ranks_that_step_on_their_own_do_not_wait_for_others() -> None:
    def body(world: lockstep.World) -> list[float]:
        model, amp = lockstep.parallelize(net().float()), scaler()
        optimizer, scales = SGD(model.parameters(), 0.1), []
        with lockstep.no_sync(model):
            for _ in range(1 + world.rank):
                amp.scale(model(parts(2)[world.rank].float()).square().mean()).backward()
                amp.step(optimizer)
                amp.update()
                scales.append(amp.get_scale())
        return scales

    assert lockstep.launch(body, nprocs=2, ranks="threads") == [[8.0], [8.0, 16.0]]
