"""Buffers: whose values they follow, when, and when they are left alone."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import lockstep
from tests.nn.test_parallelize import BOTH
from tests.ranks import run_ranks


def test_buffers_follow_rank_0_with_each_backward() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        mine = lockstep.parallelize(model, process_group=group)
        for _ in range(3):
            mine(torch.randn(4, 3) + rank).sum().backward()
        return [b.clone() for b in model.buffers()]

    first, *others = run_ranks(3, body)
    for buffers in others:
        assert all(torch.equal(a, b) for a, b in zip(first, buffers, strict=True))
    assert first[0].abs().sum() > 0


def test_buffers_that_are_set_anew_follow_too() -> None:
    class Average(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)
            self.register_buffer("mean", torch.zeros(3))
            self.register_buffer("count", torch.zeros((), dtype=torch.int16))
            self.register_buffer("flags", torch.zeros(5, dtype=torch.bool))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
            self.count = self.count + 1 + len(x) % 2
            return self.layer(x)

    def body(rank: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
        model = lockstep.parallelize(Average(), process_group=group)
        for _ in range(3):
            model(torch.randn(4 + rank, 3)).sum().backward()
        return [*model.buffers()]

    first, second = run_ranks(2, body)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert first[1] == 3


def test_buffers_that_are_recomputed_in_backward_follow_too() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        mine = lockstep.parallelize(model, process_group=group)
        for _ in range(3):
            x = torch.randn(4, 3) + rank
            checkpoint(mine, x, use_reentrant=False, preserve_rng_state=False).sum().backward()
        return [b.clone() for b in model.buffers()]

    first, second = run_ranks(2, body)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_buffers_stay_apart_if_asked_to() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> torch.Tensor:
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        mine = lockstep.parallelize(model, process_group=group, broadcast_buffers=False)
        mine(torch.randn(4, 3) + rank).sum().backward()
        return model[1].running_mean

    assert not torch.equal(*run_ranks(2, body))


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_two_forwards_with_batch_norm_then_two_backwards(mode: str) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        mine = getattr(lockstep.parallelize(model, process_group=group), mode)()
        losses = [mine(torch.randn(4, 3) + rank).sum() for _ in range(2)]
        for loss in losses:
            loss.backward()

    run_ranks(2, body)


class Statistics(nn.Module):
    """A buffer of each kind, which forward fills with the rank."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.inner = nn.Module()
        for name in ("followed", "averaged", "late", "own"):
            self.inner.register_buffer(name, torch.zeros(2))
        self.inner.register_buffer("averaged_count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor, value: int) -> torch.Tensor:
        with torch.no_grad():
            for buffer in self.inner.buffers():
                buffer.fill_(value)
        return self.layer(x)


@BOTH
def test_each_buffer_has_its_policy(parallel) -> None:
    policies = {"*.averaged*": "mean", "*.late": "late", "*.own": "local"}

    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = Statistics()
        mine = parallel(model, group, broadcast_buffers=policies)
        mine(torch.ones(1, 3), rank + 1).sum().backward()
        seen = {name: buffer.tolist() for name, buffer in model.inner.named_buffers()}
        assert seen == {
            "followed": [1, 1],
            "averaged": [2, 2],
            "late": [rank + 1, rank + 1],
            "own": [rank + 1, rank + 1],
            "averaged_count": 1,
        }
        lockstep.sync_buffers(mine)
        assert model.inner.late.tolist() == [2, 2]
        assert model.inner.own.tolist() == [rank + 1, rank + 1]

    run_ranks(3, body)


@BOTH
def test_a_policy_that_does_not_exist_is_refused(parallel) -> None:
    with pytest.raises(ValueError, match=r"'sum' for '\*', but must have one of 'rank0', 'mean'"):
        parallel(Statistics(), None, broadcast_buffers={"*": "sum"})


class Scaled(nn.Module):
    """A buffer that the backward needs, and that some forwards change before they use it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3).double()
        self.register_buffer("scale", torch.ones(3, dtype=torch.float64))

    def forward(self, x: torch.Tensor, scale: float | None = None) -> torch.Tensor:
        if scale is not None:
            self.scale.fill_(scale)
        return self.layer(x) * self.scale


def test_a_buffer_that_autograd_has_saved_is_left_alone() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = lockstep.parallelize(Scaled(), process_group=group)
        x = torch.ones(1, 3, dtype=torch.float64)
        earlier = model.layer(x).sum()
        later = model(x, scale=rank + 1.0).sum()
        earlier.backward()  # rank 0's buffers come, while this rank's are still needed
        assert model.scale.tolist() == [rank + 1] * 3
        model.zero_grad()
        later.backward()
        assert model.layer.bias.grad.tolist() == [1.5] * 3  # the mean of 1 and 2
        assert model.scale.tolist() == [1] * 3

    run_ranks(2, body)


def test_a_rank_may_evaluate_alone() -> None:
    """Nothing is exchanged in a forward, so nobody has to come along."""

    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        mine = lockstep.DistributedDataParallel(model, process_group=group)
        mine(torch.randn(4, 3)).sum().backward()
        if rank == 0:
            for mode in (mine.eval(), mine.train()):
                with torch.no_grad():
                    mode(torch.randn(4, 3))
        mine(torch.randn(4, 3)).sum().backward()

    run_ranks(2, body)
