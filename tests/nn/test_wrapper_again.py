"""A model that is wrapped a second time, or whose wrapper is taken off."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lockstep
from tests.nn.models import Refusing
from tests.nn.parallel import mean_gradients, net, parts
from tests.ranks import run_ranks
from tests.same import assert_same, gradients_of

OurDDP = lockstep.DistributedDataParallel


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def in_one_process(num_steps: int) -> list[torch.Tensor]:
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(num_steps):
        step(model, optimizer, parts(2).flatten(0, 1))
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("lives", [True, False], ids=["the first lives", "the first is gone"])
@pytest.mark.parametrize("before", [0, 2], ids=["at once", "after two steps"])
def test_a_second_wrapper_takes_over(lives: bool, before: int) -> None:
    """As when a notebook's cell is run again."""

    def body(rank: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
        inner = net()
        optimizer = torch.optim.Adam(inner.parameters(), lr=0.1)
        model = OurDDP(inner, process_group=group)
        for _ in range(before):
            step(model, optimizer, parts(2)[rank])
        first = model if lives else None
        for _ in range(2):
            model = OurDDP(inner, process_group=group)
        for _ in range(2):
            step(model, optimizer, parts(2)[rank])
        if first is not None:  # both are wrappers of one model now
            step(first, optimizer, parts(2)[rank])
            with first.no_sync():
                assert not model.require_backward_grad_sync
        else:
            step(model, optimizer, parts(2)[rank])
        return [parameter.detach() for parameter in inner.parameters()]

    for parameters in run_ranks(2, body):
        assert_same(parameters, in_one_process(before + 3))


def test_a_second_wrapper_may_be_over_other_ranks() -> None:
    def body(world: lockstep.World) -> None:
        inner = net()
        first = OurDDP(inner)
        alone = [dist.new_group([rank]) for rank in range(2)][world.rank]
        model = OurDDP(inner, process_group=alone)
        plain = net()
        if world.rank == 0:
            model(parts(2)[0]).square().mean().backward()
            plain(parts(2)[0]).square().mean().backward()
            assert_same(gradients_of(inner), gradients_of(plain))
            assert first.require_backward_grad_sync

    lockstep.launch(body, 2, ranks="threads")


def test_what_is_around_the_first_goes_on_with_the_second() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        part = net()
        first = OurDDP(part, process_group=group)
        whole = nn.Sequential(first, nn.Linear(3, 1).double())
        model = OurDDP(whole, process_group=group)
        second = OurDDP(part, process_group=group)
        with model.no_sync():
            assert not second.require_backward_grad_sync
            if rank == 0:  # alone, without the other
                model(parts(2)[rank]).sum().backward()

    run_ranks(2, body)


def test_a_comm_hook_of_the_first_goes_with_it() -> None:
    def hook(state: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        done = torch.futures.Future()
        done.set_result(bucket.buffer().fill_(7))
        return done

    def body(rank: int, group: dist.ProcessGroup) -> list[torch.Tensor | None]:
        inner = net()
        first = OurDDP(inner, process_group=group)
        first.register_comm_hook(None, hook)
        OurDDP(inner, process_group=group)  # which is gone at once
        OurDDP(inner, process_group=group)
        first(parts(2)[rank]).square().mean().backward()
        return gradients_of(first)

    for mine in run_ranks(2, body):
        assert_same(mine, mean_gradients(net(), parts(2)))


def test_without_its_hooks_a_model_is_this_ranks_own_altogether() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
        inner = net()
        optimizer = torch.optim.Adam(inner.parameters(), lr=0.1)
        model = OurDDP(inner, process_group=group)
        step(model, optimizer, parts(2)[rank])
        model._remove_autograd_hooks()
        start = [parameter.detach().clone() for parameter in inner.parameters()]
        if rank == 0:  # alone, without the other: backward, step, and what torch tells of changes
            step(model, optimizer, parts(2)[rank])
            optimizer.step()
            inner.register_parameter("more", nn.Parameter(torch.ones(1)))
            step(model, optimizer, parts(2)[rank])
            model.double()
            with model.join(), model.no_sync():
                step(model, optimizer, parts(2)[rank])
            del inner.more
        with torch.no_grad():
            for parameter, value in zip(inner.parameters(), start, strict=True):
                parameter.copy_(value)
        optimizer = torch.optim.Adam(inner.parameters(), lr=0.1)
        lockstep.parallelize(inner, process_group=group)
        step(inner, optimizer, parts(2)[rank])
        return gradients_of(inner)

    def expected() -> list[torch.Tensor | None]:
        model = net()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        for _ in range(2):
            if _:
                optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
            step(model, optimizer, parts(2).flatten(0, 1))
        return gradients_of(model)

    for mine in run_ranks(2, body):
        assert_same(mine, expected())


def test_hooks_are_taken_off_after_a_failed_backward() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> list[torch.Tensor | None]:
        inner = net()
        model = OurDDP(inner, process_group=group)
        with pytest.raises(ArithmeticError, match="refused"):
            model(Refusing.apply(parts(2)[rank].requires_grad_())).square().mean().backward()
        model._remove_autograd_hooks()
        model.zero_grad()
        again = OurDDP(inner, process_group=group)
        again(parts(2)[rank]).square().mean().backward()
        return gradients_of(inner)

    for mine in run_ranks(2, body):
        assert_same(mine, mean_gradients(net(), parts(2)))


def test_a_third_wrapper_when_the_second_is_gone() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
        inner = net()
        optimizer = torch.optim.Adam(inner.parameters(), lr=0.1)
        models = [OurDDP(inner, process_group=group) for _ in range(2)]
        del models[1]
        gc.collect()
        models.append(OurDDP(inner, process_group=group))
        for model in models:
            step(model, optimizer, parts(2)[rank])
        return [parameter.detach() for parameter in inner.parameters()]

    for parameters in run_ranks(2, body):
        assert_same(parameters, in_one_process(2))
