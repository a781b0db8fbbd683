"""Fabric, with its own strategy and with lockstep's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import lockstep
from tests.clients.forks import Forks
from tests.clients.toy import Net, assert_ranks_as_alone, dataset, loader, parameters_of, place


def train_by_fabric(name: str, *, is_sharded: bool = False) -> Any:
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import DDPStrategy

    from lockstep.integrations.fabric import LockstepStrategy

    torch.set_default_dtype(torch.float64)  # to which it casts what the model returns
    strategies = {"alone": lambda: "auto", "torch": DDPStrategy, "lockstep": LockstepStrategy}
    fabric = Fabric(
        accelerator="cpu", devices=place()[1], strategy=strategies[name](), precision="64-true"
    )
    fabric.launch()
    net = Net()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), 0.1, momentum=0.9))
    if is_sharded:
        lockstep.shard_optimizer(optimizer)
    batches = fabric.setup_dataloaders(loader(dataset()), use_distributed_sampler=False)
    for step, (x, y) in enumerate(batches):
        is_adding = step % 2 == 0
        with fabric.no_backward_sync(model, enabled=is_adding and name != "alone"):
            fabric.backward(F.cross_entropy(model(x), y) / 2)
        if not is_adding:
            fabric.clip_gradients(model, optimizer, max_norm=0.3)
            optimizer.step()
            optimizer.zero_grad()
    if name == "lockstep":
        assert dist.get_backend() == "shm"
    assert len(optimizer.state_dict()["state"]) == len([*net.parameters()])
    assert list(model.state_dict()) == list(net.state_dict())
    mean = fabric.all_reduce(F.cross_entropy(model(x), y), reduce_op="mean")
    return parameters_of(net), mean.detach()


@pytest.fixture(scope="module")
def alone(forks: Forks) -> Any:
    return forks.run(train_by_fabric, 1, "alone")[0]


@pytest.mark.parametrize("strategy", ["torch", "lockstep"])
def test_fabric_gives_what_one_process_gives(forks: Forks, alone: Any, strategy: str) -> None:
    assert_ranks_as_alone(forks.run(train_by_fabric, 2, strategy), alone)


def test_a_sharded_optimizer_gives_the_same(forks: Forks, alone: Any) -> None:
    assert_ranks_as_alone(forks.run(train_by_fabric, 2, "lockstep", is_sharded=True), alone)
