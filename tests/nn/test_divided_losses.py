"""A loss that is divided by the number of micro-batches, as other trainers want it, is told of."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lockstep
from lockstep.nn import parallel_state
from tests.ranks import run_ranks


def one_step(
    factors: list[float], model: nn.Module, group: dist.ProcessGroup | None = None
) -> None:
    """One step of as many micro-batches, whose losses are multiplied by ``factors``."""
    for number, factor in enumerate(factors, start=1):
        losses = model(torch.ones(number, 2)).square()
        loss = lockstep.mean(losses, process_group=group) * factor
        if number == len(factors):
            loss.backward()
        else:
            with lockstep.accumulate(model):
                loss.backward()
    model.zero_grad()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_division_by_the_number_of_micro_batches_is_told_once(
    num_ranks: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(parallel_state, "_has_warned", False)

    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = lockstep.parallelize(nn.Linear(2, 1), process_group=group)
        for _ in range(2):
            one_step([1 / 3] * 3, model, group)

    with caplog.at_level(logging.WARNING):
        run_ranks(num_ranks, body)
    (record,) = caplog.records
    assert "Each of the 3 losses of a step under lockstep.accumulate() is divided by 3." in (
        record.getMessage()
    )


@pytest.mark.parametrize(
    "factors",
    [[1.0] * 3, [0.5] * 2, [0.25] * 3, [0.25, 0.25, 0.25, 1.0], [1 / 3], [1.0, 1 / 3, 1 / 3]],
    ids=str,
)
def test_other_factors_are_not_told_of(
    factors: list[float], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(parallel_state, "_has_warned", False)
    model = lockstep.parallelize(nn.Linear(2, 1))
    one_step([1 / 4] * 2, model)
    one_step(factors, model)
    assert not caplog.records
