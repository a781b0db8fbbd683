"""Updates of a sharded optimizer that arrive while the program goes on, on several streams."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lockstep
from tests.simulated import cuda

pytestmark = pytest.mark.forks


def read_on_two_streams(world: lockstep.World, joins_late: bool) -> list[float]:
    """The sums of the parameters as a stream reads them, and then another one."""
    torch.manual_seed(1)
    model = lockstep.parallelize(nn.Linear(64, 64).to(world.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = lockstep.shard_optimizer(optimizer, overlap=True)
    x = torch.randn(4, 64, device=world.device)
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    optimizer.zero_grad()
    model(x).square().mean().backward()
    torch.cuda.synchronize()
    with cuda.delayed("0,lazy"):
        optimizer.step()
        if not joins_late:
            side.wait_stream(main)
        first = model.weight.sum()
        if joins_late:
            side.wait_stream(main)
        with torch.cuda.stream(side):
            second = model.weight.sum()
        side.synchronize()
        return [second.item(), first.item()]


@pytest.mark.parametrize(
    "joins_late",
    [
        True,
        pytest.param(
            False,
            marks=pytest.mark.xfail(
                reason="only the first stream that reads parameters waits for their update",
                strict=True,
            ),
        ),
    ],
)
def test_each_stream_that_reads_parameters_waits_for_their_update(joins_late: bool) -> None:
    for second, first in lockstep.launch(read_on_two_streams, 2, (joins_late,)):
        assert second == first
