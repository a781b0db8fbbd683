"""The order in which ranks launch collectives of two groups: NCCL may deadlock in two orders."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lockstep

pytestmark = pytest.mark.forks

NUM_STEPS = 4


def in_another_order(world: lockstep.World, is_other: bool) -> str:
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    x = torch.ones(2, device=world.device)
    for group in groups:
        dist.all_reduce(x, group=group)
    torch.accelerator.synchronize()
    for group in reversed(groups) if is_other and world.rank else groups:
        dist.all_reduce(x, group=group)
    try:
        torch.accelerator.synchronize()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("is_other", [False, True])
def test_ranks_that_launch_two_groups_in_different_orders_are_told(is_other: bool) -> None:
    for rank, told in enumerate(lockstep.launch(in_another_order, 2, (is_other,))):
        words = f"ranks {rank} and {1 - rank} of a group launch collectives of two communicators in"
        assert (words in told) == is_other


class Layer(nn.Linear):
    """A layer with a buffer of its last input's mean."""

    def __init__(self) -> None:
        super().__init__(8, 8, dtype=torch.float64)
        self.register_buffer("last", torch.zeros((), dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last.copy_(x.detach().mean())
        return super().forward(x)


def models() -> list[nn.Sequential]:
    torch.manual_seed(1)
    return [nn.Sequential(*(Layer() for _ in range(4))) for _ in range(2)]


def batch() -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(8, 8, dtype=torch.float64, generator=generator)


def in_turns(models: list[nn.Sequential], x: torch.Tensor, rank: int) -> torch.Tensor:
    """A loss of layers of both models in turns; rank 1 leaves out the last of the first model."""
    for number, (one, other) in enumerate(zip(*models, strict=True)):
        x = other(x if rank and number == 3 else one(x))
    return x.square().mean()


def of_each(models: list[nn.Sequential], x: torch.Tensor, rank: int) -> torch.Tensor:
    """A loss of both models, which rank 1 calls in another order."""
    outputs = [model(x).square().mean() for model in (models[::-1] if rank else models)]
    return outputs[0] + outputs[1]


def train_two_models(world: lockstep.World, loss: Callable, kind: str) -> list[torch.Tensor]:
    """Parameters after some steps of two models, each in a group of its own."""
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    local = [
        lockstep.parallelize(model.to(world.device), process_group=group, bucket_cap_mb=0.0006)
        for model, group in zip(models(), groups, strict=True)
    ]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in local]
    if kind != "plain":
        for optimizer in optimizers:
            lockstep.shard_optimizer(optimizer, overlap=kind == "overlapped")
    x = batch().chunk(2)[world.rank].to(world.device)
    for _ in range(NUM_STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss(local, x, world.rank).backward()
        for optimizer in optimizers:
            optimizer.step()
        torch.accelerator.synchronize()  # which raises what ranks are told
    return [parameter.detach().cpu() for model in local for parameter in model.parameters()]


def trained_alone(loss: Callable) -> list[torch.Tensor]:
    alone = models()
    parameters = [parameter for model in alone for parameter in model.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        for rank, x in enumerate(batch().chunk(2)):
            (loss(alone, x, rank) / 2).backward()
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


@pytest.mark.parametrize("kind", ["plain", "sharded", "overlapped"])
@pytest.mark.parametrize("loss", [in_turns, of_each])
def test_two_models_in_two_groups_launch_in_one_order(loss: Callable, kind: str) -> None:
    expected = trained_alone(loss)
    for found in lockstep.launch(train_two_models, 2, (loss, kind)):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def in_compiled_backwards(world: lockstep.World, loss: Callable, kind: str) -> list[torch.Tensor]:
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        return train_two_models(world, loss, kind)


def test_two_models_in_two_groups_launch_in_one_order_in_compiled_backwards() -> None:
    expected = trained_alone(of_each)
    for found in lockstep.launch(in_compiled_backwards, 2, (of_each, "plain")):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
