"""Models whose work is on several streams: what torch's own wrapper does right."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import lockstep
from tests.simulated import control

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
        if x.device.type == "cpu":
            return self.last(self.first(x) + self.second(x))
        current = torch.accelerator.current_stream()
        self.side.wait_stream(current)
        first = second = x
        # In turns, so that a bucket has gradients of both.
        for one, other in zip(self.first, self.second, strict=True):
            first = one(first)
            with self.side:
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


def moved_by_hand(model: nn.Module) -> nn.Module:
    device = next(model.parameters()).device
    lockstep.parallelize(model.cpu(), bucket_cap_mb=0.005)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(device)
    return model


def of_torch(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.005)


def gradients(world: lockstep.World, wrap: Callable, delay: str) -> list[list[torch.Tensor]]:
    """Those of each of three backwards."""
    model = two_branches().to(world.device)
    model.side = torch.Stream(control.KIND)
    parallel = wrap(model)
    x = batch(world.world_size).chunk(world.world_size)[world.rank].to(world.device)
    torch.accelerator.synchronize()
    found = []
    with control.delayed(delay):
        for _ in range(3):
            parallel.zero_grad()
            parallel(x).square().sum(1).mean().backward()
            found.append([parameter.grad.clone() for parameter in model.parameters()])
        torch.accelerator.current_stream().synchronize()
        return [[gradient.cpu() for gradient in each] for each in found]


@pytest.mark.parametrize(
    ("world_size", "delay"),
    [(2, "0,5"), (2, "5,0"), (2, "0,lazy"), (2, "lazy,0"), (2, "lazy"), (3, "0,5"), (3, "lazy")],
)
@pytest.mark.parametrize("wrap", [parallelized, wrapped, moved_later, moved_by_hand, of_torch])
def test_gradients_of_branches_on_two_streams(wrap: Callable, world_size: int, delay: str) -> None:
    if torch.accelerator.device_count() < world_size:
        pytest.skip("needs a device for each rank")
    expected = two_branches()
    expected(batch(world_size)).square().sum(1).mean().backward()
    theirs = [parameter.grad for parameter in expected.parameters()]
    for found in lockstep.launch(gradients, world_size, (wrap, delay)):
        for mine in found:
            torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


class TwoDevices(nn.Module):
    """A model of which each half is on a device of its own, with two streams there."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = two_branches(), two_branches()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for half in self.first, self.second:
            device = half.last.weight.device
            with torch.accelerator.device_index(device.index):
                x = half(x.to(device))
        return x


def gradients_on_two_devices(world: lockstep.World, delay: str) -> list[torch.Tensor]:
    model = TwoDevices()
    # Ranks can share devices over Gloo, where it carries their tensors.
    shares = control.KIND == "cuda"
    first = 0 if shares else 2 * world.rank
    devices = [torch.device(control.KIND, first + number) for number in range(2)]
    for half, device in zip((model.first, model.second), devices, strict=True):
        half.to(device)
        half.side = torch.Stream(device)
    torch.accelerator.set_device_index(devices[0])
    group = torch.distributed.new_group(backend="gloo" if shares else None)
    parallel = lockstep.parallelize(model, bucket_cap_mb=0.005, process_group=group)
    x = batch(world.world_size).chunk(world.world_size)[world.rank].to(devices[0])
    torch.accelerator.synchronize()
    with control.delayed(delay):
        for _ in range(3):
            parallel.zero_grad()
            parallel(x).square().sum(1).mean().backward()
        for device in devices:
            torch.accelerator.current_stream(device).synchronize()
        return [parameter.grad.cpu() for parameter in model.parameters()]


@pytest.mark.parametrize("delay", ["0,5", "5,0", "lazy"])
def test_gradients_of_two_devices_with_two_streams_each(delay: str) -> None:
    expected = TwoDevices()
    expected(batch(2)).square().sum(1).mean().backward()
    for mine in lockstep.launch(gradients_on_two_devices, 2, (delay,)):
        for gradient, parameter in zip(mine, expected.parameters(), strict=True):
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-10, atol=1e-10)
