"""Derivatives through SyncBatchNorm of any order are those of BatchNorm on the whole batch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lockstep
from lockstep import SyncBatchNorm, errors
from tests.nn.batch_norm import CHANNELS, batches
from tests.ranks import BACKENDS, Backend, run_ranks
from tests.same import assert_same, gradients_of


class ByHand(nn.BatchNorm1d):
    """BatchNorm in functions with all derivatives; the third one of torch's own is wrong."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        center = x.mean((0, 2), keepdim=True)
        spread = (x - center).square().mean((0, 2), keepdim=True)
        normal = (x - center) * (spread + self.eps).rsqrt()
        return normal if self.weight is None else normal * self.weight[:, None] + self.bias[:, None]


def penalty(model: nn.Module, x: torch.Tensor, order: int, group: Any = None) -> torch.Tensor:
    """A loss of the derivatives of that order."""
    x = x.clone().requires_grad_()
    slope = model(x).sigmoid()
    for _ in range(order):
        (slope,) = torch.autograd.grad(slope.square().sum(), x, create_graph=True)
    return lockstep.mean((slope.flatten(1).square().sum(1) - 1).square(), process_group=group)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize(("order", "sizes"), [(1, [3, 1, 0, 4]), (2, [3, 1, 2, 4])])
def test_gradients_can_be_differentiated_again(
    order: int, sizes: list[int], affine: bool, backend: Backend
) -> None:
    """The gradients of a gradient penalty are those of one process."""

    def model(kind: type[nn.Module]) -> nn.Module:
        layers = kind(CHANNELS, affine=affine), nn.Tanh(), nn.Conv1d(CHANNELS, CHANNELS, 1)
        whole = nn.Sequential(*layers, kind(CHANNELS)).double()
        with torch.no_grad():
            for parameter in whole.parameters():
                parameter.copy_(torch.arange(1.0, parameter.numel() + 1).view_as(parameter).sin())
        return whole

    (parts,) = batches((2,), sizes, count=1)

    def body(rank: int, group: dist.ProcessGroup) -> list[torch.Tensor | None]:
        converted = SyncBatchNorm.convert_sync_batchnorm(model(nn.BatchNorm1d), group)
        converted = lockstep.parallelize(converted, process_group=group)
        penalty(converted, parts[rank], order, group).backward()
        return gradients_of(converted)

    alone = model(ByHand)
    penalty(alone, torch.cat(parts), order).backward()
    for found in run_ranks(len(sizes), body, backend=backend):
        assert_same(found, gradients_of(alone), 1e-9)


def test_derivatives_that_ranks_take_in_different_orders_are_refused() -> None:
    """The graph of a convolution of no samples is another one, from the third derivative on."""
    (parts,) = batches((2,), [3, 0], count=1)
    model = nn.Sequential(nn.Conv1d(CHANNELS, CHANNELS, 1), nn.BatchNorm1d(CHANNELS)).double()

    def body(rank: int, group: dist.ProcessGroup) -> None:
        converted = SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(model), group)
        with pytest.raises(errors.ModelError, match="in different orders"):
            penalty(converted, parts[rank], 2, group).backward()

    run_ranks(2, body)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap])
def test_transforms_of_its_input_are_refused(transform: Any) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        norm = SyncBatchNorm(CHANNELS, track_running_stats=False, process_group=group)
        x = torch.ones(4, 2, CHANNELS)
        with pytest.raises(errors.ModelError, match=r"In grad\(\), vmap\(\)"):
            transform(lambda x: norm(x.view(-1, CHANNELS)).sum())(x)
        norm(x[0])

    run_ranks(2, body)
