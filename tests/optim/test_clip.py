"""clip_grad_norm_: torch's, over gradients that nobody has summed as a whole."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lockstep
from tests.nn.models import Digits
from tests.optim.programs import adamw, losses
from tests.ranks import run_ranks


def clipped(group: dist.ProcessGroup, first: Any, rank: int, *, sharded: bool, **how: Any) -> Any:
    model = lockstep.parallelize(copy.deepcopy(first), process_group=group)
    optimizer = adamw(model.parameters())
    clip = torch.nn.utils.clip_grad_norm_
    if sharded:
        lockstep.shard_optimizer(optimizer)
        clip = lockstep.clip_grad_norm_
    norms = []
    for number, loss in enumerate(losses(model, rank, 6)):
        loss.backward()
        if sharded and number % 3 == 1 and rank == 0:
            assert model.conv1.weight.grad is not None  # read, on one rank alone
        parameters = [*model.parameters()]
        norms.append(clip(parameters[number % 2 :], 0.01, **how))
        if number == 4:
            norms.append(torch.cat([p.grad.flatten() for p in parameters]).norm())
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack([norm.detach() for norm in norms]), model


@pytest.mark.parametrize("backend", ["threads", "shm", "gloo"])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf, 0.0, -math.inf])
def test_it_clips_as_torchs_does(norm_type: float, backend: str) -> None:
    first = Digits().double()

    def body(rank: int, group: dist.ProcessGroup) -> Any:
        expected, plain = clipped(group, first, rank, sharded=False, norm_type=norm_type)
        norms, model = clipped(group, first, rank, sharded=True, norm_type=norm_type)
        torch.testing.assert_close(norms, expected, rtol=1e-12, atol=0)
        for a, b in zip(plain.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
        return norms

    one, other = run_ranks(2, body, backend=backend)
    assert torch.equal(one, other)


def test_no_rank_takes_the_norm_of_more_than_the_gradients() -> None:
    """Behind them are the facts, where ranks can't divide the elements evenly."""

    def body(rank: int, group: dist.ProcessGroup) -> list[float]:
        model = lockstep.parallelize(torch.nn.Linear(8, 2, bias=False), process_group=group)
        lockstep.shard_optimizer(adamw(model.parameters()))
        model(torch.ones(1, 8)).sum().backward()
        return lockstep.clip_grad_norm_(model.parameters(), 1.0).item()

    assert run_ranks(3, body) == [4.0] * 3


def test_a_parameter_that_is_given_twice_counts_twice() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> list[float]:
        model = lockstep.parallelize(torch.nn.Linear(9, 1), process_group=group)
        lockstep.shard_optimizer(adamw(model.parameters()))
        model(torch.ones(1, 9)).sum().backward()
        return lockstep.clip_grad_norm_([model.weight, model.weight], 100.0).item()

    assert run_ranks(2, body) == [pytest.approx(18**0.5)] * 2


def test_a_norm_that_is_not_finite_is_an_error_on_request() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = lockstep.parallelize(Digits(), process_group=group)
        lockstep.shard_optimizer(adamw(model.parameters()))
        (next(losses(model, rank, 1)) * math.inf).backward()
        with pytest.raises(RuntimeError, match="error_if_nonfinite"):
            lockstep.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        assert not lockstep.clip_grad_norm_(model.parameters(), 1.0).isfinite()

    run_ranks(2, body)


def test_without_a_sharded_optimizer_it_is_torchs() -> None:
    parameter = torch.nn.Parameter(torch.ones(4))
    parameter.grad = torch.full((4,), 2.0)
    assert lockstep.clip_grad_norm_(parameter, 1.0) == 4.0
    torch.testing.assert_close(parameter.grad, torch.full((4,), 0.5))


def test_ranks_without_data_need_not_call_it() -> None:
    first = Digits()

    def body(rank: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
        models = []
        for shard in (lambda optimizer: optimizer), lockstep.shard_optimizer:
            model = lockstep.parallelize(copy.deepcopy(first), process_group=group)
            optimizer = shard(adamw(model.parameters()))
            with lockstep.join(model):
                for loss in losses(model, rank, 2 + 2 * rank):
                    loss.backward()
                    lockstep.clip_grad_norm_(model.parameters(), 0.01)
                    optimizer.step()
                    optimizer.zero_grad()
            models.append([parameter.detach() for parameter in model.parameters()])
        torch.testing.assert_close(*models, rtol=0, atol=0)
        return models[0]

    run_ranks(2, body)


def test_gradients_of_several_dtypes_have_one_norm() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = torch.nn.ModuleList([torch.nn.Linear(50, 50), torch.nn.Linear(50, 50).bfloat16()])
        lockstep.parallelize(model, process_group=group)
        lockstep.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        found = []
        for clip in torch.nn.utils.clip_grad_norm_, lockstep.clip_grad_norm_:
            x = torch.ones(4, 50)
            (model[0](x).sum() + model[1](x.bfloat16()).sum()).backward()
            norm = clip(model.parameters(), 1.0)
            found.append([norm, *(parameter.grad for parameter in model.parameters())])
            model.zero_grad()
        torch.testing.assert_close(*found, rtol=1e-2, atol=0)

    run_ranks(2, body)
