"""Averages of what still lies elsewhere: bit for bit those of what was brought first."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.comm.groups import run_on
from tests.comm.test_hosts import run_hosts

# From which element on; large enough that every rank has a share of its own, and cut so that
# sources end inside of shares, begin there, and leave gaps.
NUMEL = 70_001
LAYOUTS = {
    "all of it": [(0, NUMEL)],
    "side by side": [(0, 10_000), (10_000, 37_123), (47_123, 22_878)],
    "with gaps": [(5, 100), (30_000, 1), (34_000, 20_000), (69_000, 1_000)],
    "none": [],
}


def own_values(rank: int) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(rank))


def average_from(group: dist.ProcessGroup, layout: list, where: str) -> torch.Tensor:
    rank = group.rank()
    values = own_values(rank)
    is_shared = where == "shared" or (where == "mixed" and rank % 2 == 0)
    buffer = group.empty(NUMEL) if is_shared else torch.empty(NUMEL)
    buffer.copy_(values)
    for start, count in layout:
        buffer[start : start + count].fill_(float("nan"))
    sources = [(start, values[start : start + count].clone()) for start, count in layout]
    group.average_from(buffer, sources).wait()
    return buffer.clone()


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("where", ["shared", "ordinary", "mixed"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("backend", ["shm", "threads"])
def test_average_is_that_of_what_was_meant(
    backend: str, world_size: int, where: str, layout: list
) -> None:
    total = own_values(0)
    for rank in range(1, world_size):
        total += own_values(rank)
    results = run_on(backend, world_size, lambda g: average_from(g, layout, where))
    for result in results:
        assert torch.equal(result, total / world_size)


@pytest.mark.parametrize("where", ["shared", "mixed"])
def test_average_over_hosts(where: str) -> None:
    layout = LAYOUTS["with gaps"]
    results = run_hosts([[0, 1], [2, 3]], lambda rank, g: average_from(g, layout, where))
    total = (own_values(0) + own_values(1)) + (own_values(2) + own_values(3))
    for result in results:
        assert torch.equal(result, total / 4)
