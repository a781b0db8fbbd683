"""Models whose work is on several streams: what torch's own wrapper does right."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import lockstep
from tests.simulated import cuda

pytestmark = pytest.mark.forks


class TwoBranches(nn.Module):
    """Branches of which one runs on a stream of its own, properly joined."""

    def __init__(self, *, width: int = 16, depth: int = 3) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Sequential(*(nn.Linear(width, width) for _ in range(depth))) for _ in range(2)
        )
        self.last = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not x.is_cuda:
            return self.last(self.first(x) + self.second(x))
        current = torch.cuda.current_stream()
        self.side.wait_stream(current)
        first = second = x
        # In turns, so that a bucket has gradients of both.
        for one, other in zip(self.first, self.second, strict=True):
            first = one(first)
            with torch.cuda.stream(self.side):
                second = other(second)
        current.wait_stream(self.side)
        second.record_stream(current)
        return self.last(first + second)


def two_branches() -> TwoBranches:
    torch.manual_seed(2)
    return TwoBranches().double()


def batch(world_size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(4 * world_size, 16, dtype=torch.float64, generator=generator)


def parallelized(model: nn.Module) -> nn.Module:
    return lockstep.parallelize(model, bucket_cap_mb=0.005)


def wrapped(model: nn.Module) -> nn.Module:
    return lockstep.DistributedDataParallel(model, bucket_cap_mb=0.005)


def moved_later(model: nn.Module) -> nn.Module:
    device = next(model.parameters()).device
    return lockstep.parallelize(model.cpu(), bucket_cap_mb=0.005).to(device)


def of_torch(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.005)


def gradients(world: lockstep.World, wrap: Callable, delay: str) -> list[torch.Tensor]:
    model = two_branches().to(world.device)
    model.side = torch.cuda.Stream()
    parallel = wrap(model)
    x = batch(world.world_size).chunk(world.world_size)[world.rank].to(world.device)
    torch.cuda.synchronize()
    with cuda.delayed(delay):
        for _ in range(3):
            parallel.zero_grad()
            parallel(x).square().sum(1).mean().backward()
        torch.cuda.current_stream().synchronize()
        return [parameter.grad.cpu() for parameter in model.parameters()]


@pytest.mark.parametrize(
    ("world_size", "delay"),
    [(2, "0,5"), (2, "5,0"), (2, "0,lazy"), (2, "lazy,0"), (2, "lazy"), (3, "0,5"), (3, "lazy")],
)
@pytest.mark.parametrize("wrap", [parallelized, wrapped, moved_later, of_torch])
def test_gradients_of_branches_on_two_streams(wrap: Callable, world_size: int, delay: str) -> None:
    if torch.cuda.device_count() < world_size:
        pytest.skip("needs a device for each rank")
    expected = two_branches()
    expected(batch(world_size)).square().sum(1).mean().backward()
    for mine in lockstep.launch(gradients, world_size, (wrap, delay)):
        for own, parameter in zip(mine, expected.parameters(), strict=True):
            torch.testing.assert_close(own, parameter.grad, rtol=1e-10, atol=1e-10)
