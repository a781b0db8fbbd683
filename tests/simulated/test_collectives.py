"""Collectives for which streams have to wait: a number is wrong where they don't.

Collectives have streams of their own, which run nothing for which nobody waits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.futures import Future

import lockstep
from tests.simulated import control

pytestmark = pytest.mark.forks


class Last(nn.Linear):
    """A layer with a buffer of its last input."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("last", torch.zeros(2, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last.copy_(x)
        return super().forward(x)


def parallelized(model: nn.Module, policy: str) -> nn.Module:
    return lockstep.parallelize(model, broadcast_buffers={"*": policy})


def with_buffer_hook(model: nn.Module, policy: str) -> nn.Module:
    """A wrapper whose buffers a hook of the program sums."""

    def sum_all(state: None, buffers: dict[str, torch.Tensor]) -> list[Future[Any]]:
        works = [dist.all_reduce(buffer, async_op=True) for buffer in buffers.values()]
        return [work.get_future() for work in works]

    wrapped = lockstep.DistributedDataParallel(model)
    wrapped._register_buffer_comm_hook(None, sum_all)
    return wrapped


def last_inputs(world: lockstep.World, wrap: Callable, policy: str) -> float:
    """The buffer after a backward, of inputs that are 1 on rank 0 and 2 on rank 1."""
    model = Last().to(world.device)
    parallel = wrap(model, policy)
    x = torch.full((2, 4), world.rank + 1.0, device=world.device)
    parallel(x).sum().backward()
    torch.accelerator.synchronize()
    with control.delayed("0,lazy"):
        parallel(x).sum().backward()
        return model.last.mean().item()


@pytest.mark.parametrize(
    ("wrap", "policy", "expected"),
    [(parallelized, "rank0", 1), (parallelized, "mean", 1.5), (with_buffer_hook, "", 3)],
)
def test_buffers_are_there_after_a_backward(wrap: Callable, policy: str, expected: float) -> None:
    assert lockstep.launch(last_inputs, 2, (wrap, policy)) == [expected, expected]


def averaged_by_hook(world: lockstep.World) -> float:
    """The mean of gradients that are 1 on rank 0 and 2 on rank 1, by a hook of the program."""

    def average(state: None, bucket: Any) -> Future[torch.Tensor]:
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        # On a stream of its own.
        return work.get_future().then(lambda future: future.value()[0].div_(world.world_size))

    model = lockstep.DistributedDataParallel(Last().to(world.device))
    model.register_comm_hook(None, average)
    x = torch.full((2, 4), world.rank + 1.0, device=world.device)
    for delay in ("0,0", "0,0", "0,lazy"):
        model.zero_grad()
        torch.accelerator.synchronize()
        with control.delayed(delay):
            (model(x).sum() / 2).backward()
            mean = model.module.weight.grad.mean().item()
    return mean


def test_gradients_that_a_hook_reduces_are_there_after_a_backward() -> None:
    assert lockstep.launch(averaged_by_hook, 2) == [1.5, 1.5]


NUM_STEPS = 6


def layers() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).double()


def batch() -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(8, 8, dtype=torch.float64, generator=generator)


def double(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad.mul_(2)


def clip_by_torch(parameters: list[nn.Parameter]) -> None:
    nn.utils.clip_grad_norm_(parameters, 0.01)


def clip(parameters: list[nn.Parameter]) -> None:
    lockstep.clip_grad_norm_(parameters, 0.01)


def leave(parameters: list[nn.Parameter]) -> None:
    pass


def step(model: nn.Module, optimizer: Any, x: torch.Tensor, change: Callable) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    change([*model.parameters()])
    optimizer.step()


def train_and_change(world: lockstep.World, overlaps: bool, change: Callable) -> list[torch.Tensor]:
    """The parameters after some steps of a sharded optimizer, as the current stream sees them."""
    model = lockstep.parallelize(layers().to(world.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    lockstep.shard_optimizer(optimizer, overlap=overlaps)
    x = batch().chunk(2)[world.rank].to(world.device)
    for _ in range(NUM_STEPS):
        torch.accelerator.synchronize()
        with control.delayed("0,lazy"):
            step(model, optimizer, x, change)
            found = [parameter.detach().clone() for parameter in model.parameters()]
            torch.accelerator.current_stream().synchronize()
    return [each.cpu() for each in found]


@pytest.mark.parametrize(
    ("overlaps", "change", "torchs"),
    [
        (False, leave, leave),
        (True, leave, leave),
        (True, double, double),
        (True, clip, clip_by_torch),
    ],
)
def test_sharded_steps_are_those_of_one_process(
    overlaps: bool, change: Callable, torchs: Callable
) -> None:
    expected = layers()
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    for _ in range(NUM_STEPS):
        step(expected, optimizer, batch(), torchs)
    for found in lockstep.launch(train_and_change, 2, (overlaps, change)):
        torch.testing.assert_close(found, [*expected.parameters()], rtol=1e-10, atol=1e-10)
