"""A forked process has the gradients of its parent as they were, and leaves the parent's alone."""

from __future__ import annotations

import os
from enum import Enum, auto

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lockstep
from tests.ranks import run_ranks


class Gradient(Enum):
    CURRENT = auto()
    KEPT = auto()
    UNSUMMED = auto()  # as no rank has read it


@pytest.mark.parametrize("what", Gradient)
def test_a_forked_process_has_gradients_of_its_own(what: Gradient) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = lockstep.parallelize(nn.Linear(2000, 2), process_group=group)
        if what is Gradient.UNSUMMED:
            lockstep.shard_optimizer(torch.optim.SGD(model.parameters()))
        run_backward(model, rank)
        gradient = None if what is Gradient.UNSUMMED else model.weight.grad
        if what is Gradient.KEPT:
            model.zero_grad()
        go, told, child = os.pipe(), os.pipe(), -1
        if rank == 0:
            child = os.fork()
        if child == 0:
            os.read(go[0], 1)
            # Not by operators of torch, of which the first may wait for ever in a forked child.
            values = (model.weight.grad if gradient is None else gradient).numpy()
            os.write(told[1], b"%d" % (values == 1.5).all())
            values[:] = 0
            os._exit(0)
        for _ in range(3):
            lockstep.reduce(torch.zeros(1), process_group=group)
            model.zero_grad(set_to_none=what is Gradient.KEPT)
            run_backward(model, 3 * rank)
        if rank == 0:
            os.write(go[1], b"1")
            assert os.read(told[0], 1) == b"1"
            os.waitpid(child, 0)
        assert model.weight.grad.eq(2.5).all()
        for end in (*go, *told):
            os.close(end)

    run_ranks(2, body, backend="shm")


def run_backward(model: nn.Module, rank: int) -> None:
    model(torch.full((1, 2000), 1.0 + rank)).sum().backward()
