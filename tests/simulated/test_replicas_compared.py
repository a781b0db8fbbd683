"""check_replicas() reads what is on devices, and repairs it there."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lockstep

pytestmark = pytest.mark.forks


def repaired(world: lockstep.World) -> list[lockstep.ReplicaDifference]:
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)).to(world.device)
    model = lockstep.parallelize(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    x = torch.rand(4, 4, device=world.device)
    for _ in range(3):
        lockstep.mean(model(x).square().sum(1)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert lockstep.check_replicas(model, optimizer) == []
    if world.rank == 1:
        with torch.no_grad():
            model[0].weight[0, 0] += 1e-6
        optimizer.state[model[0].bias]["step"] += 1
    found = lockstep.check_replicas(model, optimizer, repair=True)
    assert lockstep.check_replicas(model, optimizer) == []
    return found


def test_a_replica_on_a_device_takes_what_the_others_have() -> None:
    for found in lockstep.launch(repaired, 3):
        names = ["parameter 0.weight", "step of 0.bias"]
        assert [(each.name, each.ranks) for each in found] == [(name, (1,)) for name in names]
