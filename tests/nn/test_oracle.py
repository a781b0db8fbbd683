"""N ranks on their parts of a batch give the gradients of one process on the whole."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import nn

import lockstep
from tests.counts import pairs
from tests.nn.models import MODELS, build
from tests.ranks import BACKENDS, Backend, run_ranks
from tests.same import assert_same, gradients_of

TOLERANCE = 1e-10
# The rows of a batch that each rank takes.
SPLITS = [[12], [6, 6], [1, 11], [4, 4, 4], [5, 0, 7], [3, 3, 3, 3], [9, 1, 1, 1]]


def one_process(model: nn.Module, batches: list[torch.Tensor]) -> list[torch.Tensor | None]:
    """The gradients of one step for each batch, with SGD steps in between."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    gradients = []
    for batch in batches:
        optimizer.zero_grad()
        (model(batch).square().sum() / len(batch)).backward()
        gradients.append(gradients_of(model))
        optimizer.step()
    return gradients


@pairs("name, sizes, backend", MODELS, SPLITS, BACKENDS)
def test_gradients_are_those_of_one_process(name: str, sizes: list[int], backend: Backend) -> None:
    model, world_size = build(name), len(sizes)
    batches = [torch.randn(12, *model.sample, dtype=torch.float64) for _ in range(4)]
    oracle = one_process(copy.deepcopy(model), batches)

    def rank_body(rank: int, group: dist.ProcessGroup) -> list:
        mine = lockstep.parallelize(copy.deepcopy(model), process_group=group, bucket_cap_mb=0.001)
        optimizer = torch.optim.SGD(mine.parameters(), lr=0.001, momentum=0.9)
        gradients = []
        for batch in batches:
            part = batch.split(sizes)[rank]
            optimizer.zero_grad()
            (mine(part).square().sum() * world_size / len(batch)).backward()
            gradients.append(gradients_of(mine))
            optimizer.step()
        return gradients

    for gradients in run_ranks(world_size, rank_body, backend=backend):
        for mine, theirs in zip(gradients, oracle, strict=True):
            assert_same(mine, theirs, TOLERANCE, single=1e-5)
