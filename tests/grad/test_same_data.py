"""A warning where every rank computes with the same samples."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lockstep
from tests.ranks import BACKENDS, Backend, run_ranks

SAID = "all ranks had the same gradients"


def take_means(
    rank: int, group: dist.ProcessGroup, *, same: bool, steps: int = 5, dtype=torch.float32
) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).to(dtype)
    lockstep.parallelize(model, process_group=group)
    generator = torch.Generator().manual_seed(0 if same else rank)
    for _ in range(steps):
        x, y = torch.randn(6, 4, generator=generator), torch.arange(6) % 2
        losses = nn.functional.cross_entropy(model(x.to(dtype)), y, reduction="none")
        lockstep.mean(losses, process_group=group).backward()
        model.zero_grad()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("world_size", [2, 3])
def test_the_same_samples_on_every_rank_are_told_of_once(
    world_size: int, dtype: torch.dtype, backend: Backend, caplog: pytest.LogCaptureFixture
) -> None:
    run_ranks(
        world_size,
        lambda rank, group: take_means(rank, group, same=True, dtype=dtype),
        backend=backend,
    )
    assert [SAID in record.getMessage() for record in caplog.records] == [True]
    assert caplog.records[0].levelno == logging.WARNING


@pytest.mark.parametrize(("same", "steps"), [(False, 5), (True, 2)])
def test_nothing_is_said_of_different_samples_or_before_it_is_clear(
    same: bool, steps: int, caplog: pytest.LogCaptureFixture
) -> None:
    run_ranks(2, lambda rank, group: take_means(rank, group, same=same, steps=steps))
    assert SAID not in caplog.text


def test_one_step_of_different_samples_is_enough_to_be_silent(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = lockstep.parallelize(nn.Linear(2, 1), process_group=group)
        for step in range(6):
            model(torch.full((1, 2), 1.0 + rank * (step == 1))).sum().backward()
            model.zero_grad()

    run_ranks(2, body)
    assert SAID not in caplog.text
