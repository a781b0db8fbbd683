"""Barriers of deferred gradients when one rank meets with an error, or lacks memory."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lockstep
from lockstep.comm import shared_buffers
from lockstep.errors import CollectiveMismatch, ModelMismatch
from tests.ranks import run_ranks

BACKENDS = pytest.mark.parametrize("backend", ["threads", "shm"])


class Scaled(nn.Module):
    """The sum of a parameter times the input, so that its gradient is the input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4096))
        self.bias = nn.Parameter(torch.zeros(64))

    def forward(self, factor: float) -> torch.Tensor:
        return (self.weight.sum() + self.bias.sum()) * factor


def scaled(group: dist.ProcessGroup) -> tuple[Scaled, torch.optim.Optimizer]:
    model = lockstep.parallelize(Scaled(), process_group=group)
    return model, lockstep.shard_optimizer(torch.optim.SGD(model.parameters(), lr=1.0))


@BACKENDS
def test_one_rank_may_lack_shared_memory_for_its_second_buffer(backend, monkeypatch) -> None:
    def zero_buffer(group, numel, dtype, device, original=shared_buffers.zero_buffer):
        if group.rank() and is_full.is_set():
            return torch.zeros(numel, dtype=dtype, device=device)
        return original(group, numel, dtype, device)

    def body(rank: int, group: dist.ProcessGroup) -> None:
        model, optimizer = scaled(group)
        total = 0.0
        for step in range(8):
            if step == 2:
                is_full.set()
            model((1 + step) * (1.0 if rank == 0 else 10.0)).backward()
            optimizer.step()
            total -= (1 + step) * 11 / 2
            assert torch.equal(model.weight, torch.full((4096,), total)), step
            if rank == 0 and step:
                time.sleep(0.1)  # so that rank 1 needs a second buffer
            optimizer.zero_grad()

    is_full = threading.Event()
    monkeypatch.setattr(shared_buffers, "zero_buffer", zero_buffer)
    run_ranks(2, body, backend=backend)


def test_an_error_in_one_model_keeps_no_rank_waiting_in_another_one() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        (first, one), (second, other) = scaled(group), scaled(group)
        for _ in range(3):
            (first(1.0) + second(1.0)).backward()
            one.zero_grad()
            other.zero_grad()
        if rank == 0:
            first._parameters["bias"] = nn.Parameter(torch.zeros(64))
        with pytest.raises(ModelMismatch, match=r"'bias' is a .*new parameter"):
            (first(1.0) + second(1.0)).backward()
        group.named_barrier("what comes next")

    run_ranks(2, body)


@BACKENDS
def test_a_mismatch_in_one_model_leaves_no_barrier_of_another_one_to_come(backend: str) -> None:
    """All ranks raise and go on together; but one of them has come to no barrier before."""

    def body(rank: int, group: dist.ProcessGroup) -> None:
        (first, one), (second, other) = scaled(group), scaled(group)
        for _ in range(3):
            (first(1.0) + second(1.0)).backward()
            one.zero_grad()
            other.zero_grad()
        loss = first(1.0)
        if rank:  # once the gradients of the second model have come
            loss.register_hook(lambda grad: group.named_barrier("something else"))
        with pytest.raises(CollectiveMismatch):
            (loss + second(1.0)).backward()
        group.named_barrier("what comes next")
        one.zero_grad()
        other.zero_grad()
        (first(1.0 + rank) + second(3.0 + rank)).backward()
        assert torch.equal(first.weight.grad, torch.full((4096,), 1.5))
        assert torch.equal(second.weight.grad, torch.full((4096,), 3.5))

    run_ranks(2, body, backend=backend)


def test_an_error_before_the_barrier_of_a_backward_leaves_the_ranks_in_step(monkeypatch) -> None:
    def exchange_buffers(group, tensor, original=shared_buffers.exchange_buffers):
        if group.rank() == 0 and fails.is_set():
            fails.clear()
            raise ValueError("on this rank alone")
        return original(group, tensor)

    def body(rank: int, group: dist.ProcessGroup) -> None:
        model, optimizer = scaled(group)
        for step in range(6):
            group.named_barrier("before the backward")
            if rank == 0 and step in (1, 4):
                fails.set()
                with pytest.raises(ValueError, match="alone"):
                    model(10.0**step).backward()
            else:
                model(10.0**step * (1 + rank)).backward()
                assert torch.equal(model.weight.grad, torch.full((4096,), 1.5 * 10.0**step))
            optimizer.zero_grad()

    fails = threading.Event()
    monkeypatch.setattr(shared_buffers, "exchange_buffers", exchange_buffers)
    run_ranks(2, body)
