"""Deferred gradients after failed backwards, and when models go before their gradients are read."""

from __future__ import annotations

import contextlib
import copy
import gc

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn

import lockstep
from lockstep.errors import CollectiveFailed, CollectiveMismatch, ParameterChanged
from tests.nn.models import Digits
from tests.optim.programs import BACKENDS, adamw, losses, sharded
from tests.ranks import run_ranks


@BACKENDS
@pytest.mark.parametrize("at", ["conv1.weight", "conv2.weight", "fc2.weight"])
def test_after_a_backward_that_failed_on_a_rank_training_goes_on(at: str, backend: str) -> None:
    first = Digits()

    def fail(gradient: torch.Tensor) -> None:
        raise ArithmeticError

    def body(rank: int, group: dist.ProcessGroup) -> None:
        models = []
        for shard in (lambda optimizer: optimizer), lockstep.shard_optimizer:
            model = lockstep.parallelize(copy.deepcopy(first), process_group=group)
            optimizer = shard(adamw(model.parameters()))
            for number, loss in enumerate(losses(model, rank, 6)):
                if number in (2, 4):
                    if rank == 1:
                        handle = model.get_parameter(at).register_hook(fail)
                    with pytest.raises(ArithmeticError if rank else CollectiveFailed):
                        loss.backward()
                    if rank == 1:
                        handle.remove()
                    optimizer.zero_grad()
                    continue
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            models.append(model)
        for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
            assert torch.equal(a, b)

    run_ranks(2, body, backend=backend)


@BACKENDS
def test_a_failed_backward_keeps_what_was_accumulated(backend: str) -> None:
    """A rank whose backward fails has the gradients of it that had come, and adds to them."""
    first = Digits()

    def fail(gradient: torch.Tensor) -> None:
        raise ArithmeticError

    def body(rank: int, group: dist.ProcessGroup) -> list[list[torch.Tensor]]:
        found = []
        for shard in (lambda optimizer: optimizer), lockstep.shard_optimizer:
            model = lockstep.parallelize(copy.deepcopy(first), process_group=group)
            optimizer = shard(adamw(model.parameters()))
            for loss in losses(model, rank, 2):
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            loss = next(losses(model, rank, 1, 2))
            handle = model.conv2.weight.register_hook(fail)
            with pytest.raises(ArithmeticError):
                loss.backward()
            handle.remove()
            found.append([torch.zeros(0) if p.grad is None else p.grad for p in model.parameters()])
        return found

    for plain, unsummed in run_ranks(2, body, backend=backend):
        torch.testing.assert_close(unsummed, plain, rtol=0, atol=0)


@BACKENDS
def test_the_next_backward_adds_to_what_a_failed_one_has_copied(backend: str) -> None:
    """Gradients so large that they are copied as they come; nobody has read them meanwhile."""
    first = nn.Sequential(*(nn.Linear(160, 160, bias=False) for _ in range(3)))

    def fail(gradient: torch.Tensor) -> None:
        raise ArithmeticError

    def body(rank: int, group: dist.ProcessGroup) -> list[list[torch.Tensor]]:
        x, found = torch.full((2, 160), 1.0 + rank), []
        for shard in (lambda optimizer: optimizer), lockstep.shard_optimizer:
            model = lockstep.parallelize(copy.deepcopy(first), process_group=group)
            optimizer = shard(adamw(model.parameters()))
            for step in range(4):
                handle = model[1].weight.register_hook(fail) if step == 2 else None
                with pytest.raises(ArithmeticError) if handle else contextlib.nullcontext():
                    model(x).square().mean().backward()
                if handle is None:
                    optimizer.step()
                    optimizer.zero_grad()
                else:
                    handle.remove()
            found.append([p.detach().clone() for p in model.parameters()])
        return found

    for plain, unsummed in run_ranks(2, body, backend=backend):
        torch.testing.assert_close(unsummed, plain, rtol=0, atol=0)


@BACKENDS
def test_gradients_outlive_the_wrapper(backend: str) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        net = nn.Linear(3, 3)
        with torch.no_grad():
            net.weight.fill_(1.0)
        wrapper = lockstep.DistributedDataParallel(net, process_group=group)
        optimizer = lockstep.shard_optimizer(torch.optim.SGD(net.parameters(), lr=1.0))
        wrapper(torch.full((1, 3), 2.0 + rank)).sum().backward()
        del wrapper
        gc.collect()
        assert (net.weight.grad == 2.5).all()
        optimizer.step()
        assert (net.weight == -1.5).all()

    run_ranks(2, body, backend=backend)


@BACKENDS
def test_without_the_wrapper_gradients_are_added_to_on_each_rank(backend: str) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        net = nn.Linear(3, 3)
        wrapper = lockstep.DistributedDataParallel(net, process_group=group)
        optimizer = lockstep.shard_optimizer(torch.optim.SGD(net.parameters(), lr=1.0))
        for _ in range(2):
            optimizer.zero_grad()
            wrapper(torch.full((1, 3), 2.0 + rank)).sum().backward()
        del wrapper
        gc.collect()
        net(torch.full((1, 3), 10.0 + rank)).sum().backward()
        assert (net.weight.grad == 12.5 + rank).all()

    run_ranks(2, body, backend=backend)


@BACKENDS
def test_gradients_are_there_though_another_rank_has_dropped_the_model(backend: str) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        first, second = (lockstep.parallelize(nn.Linear(9, 9), process_group=group) for _ in "ab")
        optimizers = [lockstep.shard_optimizer(adamw(m.parameters())) for m in (first, second)]
        for _ in range(2):
            first(torch.full((1, 9), 2.0 + rank)).sum().backward()
        weight = first.weight
        optimizers.pop(0)
        if rank == 1:
            del first, weight
            gc.collect()
        for _ in range(12):
            second(torch.ones(1, 9)).sum().backward()
            optimizers[0].step()
            optimizers[0].zero_grad()
        if rank == 0:
            assert (weight.grad == 5.0).all()

    run_ranks(2, body, backend=backend)


@BACKENDS
def test_a_norm_after_a_failed_backward_is_that_of_the_gradients(backend: str) -> None:
    def fail(gradient: torch.Tensor) -> None:
        raise ArithmeticError

    def body(rank: int, group: dist.ProcessGroup) -> None:
        model, optimizer = sharded(group, Digits())
        for number, loss in enumerate(losses(model, rank, 7)):
            handle = model.conv1.weight.register_hook(fail) if number == 2 and rank else None
            try:
                loss.backward()
            except (ArithmeticError, CollectiveFailed):
                assert number == 2
            if handle is not None:
                handle.remove()
            if number != 2:
                assert lockstep.clip_grad_norm_(model.parameters(), 1.0).isfinite()
                optimizer.step()
            optimizer.zero_grad()

    run_ranks(2, body, backend=backend)


def test_a_parameter_of_another_shape_is_named() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model, _ = sharded(group, nn.Linear(3, 3))
        model(torch.ones(1, 3)).sum().backward()
        model.zero_grad()
        model.weight.data = model.weight.data[:1].clone()
        model.bias.data = model.bias.data[:1].clone()
        with pytest.raises(ParameterChanged, match=r"'(weight|bias)' is \(1,"):
            model(torch.ones(1, 3)).sum().backward()

    run_ranks(2, body)


@BACKENDS
def test_after_a_mismatch_no_gradient_is_overwritten_that_another_rank_reads(backend: str) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model, _ = sharded(group, nn.Linear(3, 1))
        for number in range(4):
            model(torch.full((1, 3), 2.0 + rank)).sum().backward()
            if number == 2:
                if rank == 0:
                    with pytest.raises(CollectiveMismatch):
                        model(torch.full((1, 3), 1e3)).sum().backward()
                else:
                    with pytest.raises(CollectiveMismatch):
                        group.barrier().wait()
            if rank == 1:
                assert (model.weight.grad == 2.5 * (number + 1)).all()
            if number == 2 and rank == 0:
                model.zero_grad()
                for parameter in model.parameters():
                    parameter.grad = torch.full_like(parameter, 7.5)

    run_ranks(2, body, backend=backend)
