"""Sums over the ranks on devices: those without float64, and where a check would have to wait."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lockstep
from lockstep.world import devices
from tests.simulated import control

pytestmark = pytest.mark.forks


def train_normalised(
    world: lockstep.World, lacks_float64: bool, differentiates: bool
) -> tuple[list[torch.Tensor], float]:
    """The parameters and buffers of a model that is trained, and the last norm of gradients."""
    if lacks_float64:
        control.device.set_float64(False)
        if control.KIND == "cuda":  # which is known to have it
            devices._has_float64 = lambda kind: kind == "cpu"  # type: ignore[assignment]
    torch.manual_seed(2)
    model: nn.Module = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    model = lockstep.SyncBatchNorm.convert_sync_batchnorm(model).to(world.device)
    model = lockstep.parallelize(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = lockstep.shard_optimizer(optimizer, overlap=True)
    torch.manual_seed(world.rank)
    x = torch.randn(4 + world.rank, 8, device=world.device, requires_grad=differentiates)
    for _ in range(3):
        optimizer.zero_grad()
        loss = lockstep.mean(model(x).square().sum(1), weight=torch.arange(len(x)))
        if differentiates:
            (slope,) = torch.autograd.grad(loss, x, create_graph=True)
            loss = loss + lockstep.mean(slope.square().sum(1))
        loss.backward()
        norm = lockstep.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    assert devices._has_float64(control.KIND) != lacks_float64
    return [each.detach().cpu() for each in model.state_dict().values()], norm.item()


@pytest.mark.parametrize("differentiates", [False, True])
def test_a_device_without_float64_sums_on_the_cpu(differentiates: bool) -> None:
    mine = lockstep.launch(train_normalised, 2, (True, differentiates))
    others = lockstep.launch(train_normalised, 2, (False, differentiates))
    for (tensors, norm), (expected, other) in zip(mine, others, strict=True):
        torch.testing.assert_close(tensors, expected)
        assert norm == pytest.approx(other, rel=1e-5)


def wide() -> nn.Module:
    torch.manual_seed(2)
    # In float64: kernels of the CPU, which simulated devices have, add up the powers of 160,000
    # elements one by one, in the elements' type. With float32 the norm of order 3 is wrong by
    # 1.4e-5 in torch's clip_grad_norm_(), and by 0.6e-5 where each rank adds up a half.
    return nn.Sequential(nn.Linear(8, 400), nn.Linear(400, 400)).double()


def batch() -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(8, 8, dtype=torch.float64, generator=generator)


def norm(world: lockstep.World, power: float) -> float:
    """The norm of gradients that are scattered."""
    model = lockstep.parallelize(wide().to(world.device))
    lockstep.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), overlap=True)
    model(batch().chunk(2)[world.rank].to(world.device)).square().mean().backward()
    return lockstep.clip_grad_norm_(model.parameters(), 0.1, power).item()


@pytest.mark.parametrize("power", [1.0, 2.0, 3.0, float("inf")])
def test_norms_of_scattered_gradients_are_those_of_one_process(power: float) -> None:
    model = wide()
    model(batch()).square().mean().backward()
    expected = nn.utils.clip_grad_norm_(model.parameters(), 0.1, power).item()
    for found in lockstep.launch(norm, 2, (power,)):
        assert found == pytest.approx(expected, rel=1e-12)


def few_values(world: lockstep.World, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs for ``number`` samples on the first rank and none on others, and the statistics."""
    norm = lockstep.SyncBatchNorm(3).to(world.device)
    x = torch.ones(0 if world.rank else number, 3, device=world.device, requires_grad=True)
    output = norm(x)
    output.sum().backward()
    return output.detach().cpu(), torch.stack([norm.running_mean, norm.running_var]).cpu()


@pytest.mark.parametrize("number", [0, 1, 2])
def test_too_few_values_are_nan_and_leave_running_statistics(number: int) -> None:
    unchanged = torch.stack([torch.zeros(3), torch.ones(3)])
    for output, statistics in lockstep.launch(few_values, 2, (number,)):
        assert output.isnan().all() == (number == 1 or not len(output))
        assert torch.equal(statistics, unchanged) == (number < 2)


def test_an_error_of_an_earlier_kernel_is_not_taken_for_one_of_a_weight() -> None:
    values = torch.randn(4, device=control.KIND)
    for call in (
        lambda: lockstep.mean(values, weight=1.0).item(),
        lambda: lockstep.average_gradients(nn.Linear(1, 1), weight=values[0].abs()),
    ):
        table, rows = torch.randn(3, 2, device=control.KIND), torch.full_like(values, 7).long()
        torch.embedding(table, rows)  # whose error comes when somebody waits
        with pytest.raises(RuntimeError, match="asynchronous"):
            call()
