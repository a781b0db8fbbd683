"""Our DistributedDataParallel and torch's, over Gloo, give the same gradients and parameters."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lockstep
from tests.counts import pairs
from tests.nn.models import build
from tests.ranks import BACKENDS, Backend, run_ranks

TOLERANCE = 1e-12
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.001, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.001),
}


def torch_ddp(model: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    return nn.parallel.DistributedDataParallel(
        model, process_group=group, find_unused_parameters=True
    )


def our_ddp(model: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    return lockstep.DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.01)


def record_steps(wrap, model, batches, optimizer_of, group) -> list[list[torch.Tensor]]:
    parallel = wrap(copy.deepcopy(model), group)
    optimizer = optimizer_of(parallel.parameters())
    seen = []
    for batch in batches:
        part = batch.chunk(group.size())[group.rank()]
        optimizer.zero_grad()
        parallel(part).square().mean().backward()
        seen.append([p.grad.clone() for p in parallel.parameters() if p.grad is not None])
        optimizer.step()
    seen.append([p.detach().clone() for p in parallel.parameters()])
    return seen


@pytest.mark.keeps_descriptors("torch's DDP keeps the process group that it was given")
@pairs(
    "name, optimizer, world_size, backend",
    ["digits", "layers", "shared", "unused"],
    OPTIMIZERS,
    [2, 3],
    BACKENDS,
)
def test_ours_and_torchs_agree(
    name: str, optimizer: str, world_size: int, backend: Backend
) -> None:
    model = build(name)
    batches = [torch.randn(12, *model.sample, dtype=torch.float64) for _ in range(5)]

    def rank_body(rank: int, group: dist.ProcessGroup) -> tuple[list, list]:
        with warnings.catch_warnings():
            # torch says so when every parameter was used after all.
            warnings.simplefilter("ignore", UserWarning)
            theirs = record_steps(torch_ddp, model, batches, OPTIMIZERS[optimizer], group)
        return record_steps(our_ddp, model, batches, OPTIMIZERS[optimizer], group), theirs

    for ours, theirs in run_ranks(world_size, rank_body, backend=backend):
        for mine, other in zip(ours, theirs, strict=True):
            for a, b in zip(mine, other, strict=True):
                torch.testing.assert_close(a, b, rtol=TOLERANCE, atol=TOLERANCE)
