"""Models that torch has divided among ranks (DTensors, FSDP): refused by name, with what works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import lockstep
from lockstep import errors
from tests.same import assert_same

SAYS = r"'first.weight' is a DTensor on DeviceMesh\(\(model=2\), 'cpu'.*train it as it is"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6).double(), nn.Linear(6, 2).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).tanh())


def divisible() -> Net:
    model = Net()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter).sin())
    return model


def tensor_parallel(mesh: DeviceMesh) -> nn.Module:
    return parallelize_module(
        divisible(), mesh, {"first": ColwiseParallel(), "second": RowwiseParallel()}
    )


def sharded(mesh: DeviceMesh) -> nn.Module:
    return fully_shard(divisible(), mesh=mesh)


def launch(body: Callable[[lockstep.World, DeviceMesh], Any]) -> list[Any]:
    def rank(world: lockstep.World) -> Any:
        return body(world, init_device_mesh("cpu", (2,), mesh_dim_names=("model",)))

    return lockstep.launch(rank, 2, ranks="threads")


@pytest.mark.parametrize("divide", [tensor_parallel, sharded])
def test_models_of_dtensors_are_refused_by_name(divide: Callable[[DeviceMesh], nn.Module]) -> None:
    def body(world: lockstep.World, mesh: DeviceMesh) -> None:
        for refuses in (
            lockstep.parallelize,
            lockstep.DistributedDataParallel,
            lambda model: lockstep.parallelize(model, init_sync=False),
            lockstep.average_gradients,
            lambda model: lockstep.DataParallel(model, ["cpu", "cpu"]),
        ):
            with pytest.raises(errors.AlreadyParallel, match=SAYS):
                refuses(divide(mesh))
        explained = str(lockstep.explain(divide(mesh)))
        assert "divided among ranks by torch" in explained
        assert "'first.weight' is a DTensor" in explained

    launch(body)


def test_a_part_that_one_rank_has_divided_is_named_on_every_rank() -> None:
    def body(world: lockstep.World, mesh: DeviceMesh) -> None:
        kind = errors.AlreadyParallel if world.rank else errors.ModelMismatch
        model = divisible()
        if world.rank:
            part = distribute_tensor(model.first.weight, mesh, [Shard(0)], src_data_rank=None)
            model.first.weight = nn.Parameter(part)
        with pytest.raises(kind, match=r"'first.weight' is a DTensor"):
            lockstep.parallelize(model)

    launch(body)


def test_what_is_divided_later_is_named() -> None:
    def body(world: lockstep.World, mesh: DeviceMesh) -> None:
        model = lockstep.parallelize(divisible())
        model(torch.ones(1, 4).double()).sum().backward()
        parallelize_module(model, mesh, {"first": ColwiseParallel(), "second": RowwiseParallel()})
        with pytest.raises(errors.AlreadyParallel, match=SAYS):
            model(torch.ones(1, 4).double()).sum().backward()

    launch(body)


def test_dtensors_may_be_left_out() -> None:
    """Their gradients stay torch's, and the others are the mean over the ranks."""

    def body(world: lockstep.World, mesh: DeviceMesh) -> None:
        model = parallelize_module(
            divisible(), mesh, {"first": ColwiseParallel(), "second": RowwiseParallel()}
        )
        model.add_module("head", nn.Linear(2, 1).double())
        names = [name for name, _ in model.named_parameters() if "head" not in name]
        lockstep.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
        wrapper = lockstep.DistributedDataParallel(model)
        x = torch.ones(1, 4).double()
        (model.head(wrapper(x)) * (world.rank + 1)).sum().backward()
        assert_same(model.head.bias.grad, torch.full((1,), 1.5).double())
        assert model.first.weight.grad.device_mesh == mesh

    launch(body)


@pytest.mark.filterwarnings("ignore:Please use DTensor instead:FutureWarning")
def test_what_is_left_out_need_not_be_describable() -> None:
    """A ShardedTensor has no numel(), stride() or nbytes."""

    def body(world: lockstep.World, mesh: DeviceMesh) -> None:
        model = nn.Module()
        spec = ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"])
        model.table = nn.Parameter(sharded_tensor.rand(spec, 4, 5))
        model.layer = nn.Linear(2, 3).double()
        wrap = lockstep.DistributedDataParallel
        wrap._set_params_and_buffers_to_ignore_for_model(model, ["table"])
        wrapper = wrap(model)
        model.layer(torch.full((1, 2), world.rank + 1.0).double()).sum().backward()
        assert_same(model.layer.weight.grad, torch.full((3, 2), 1.5).double())
        facts = wrapper._get_ddp_logging_data()
        assert (facts["num_parameter_tensors"], facts["total_parameter_size_bytes"]) == (2, 72)
        assert wrapper.device == torch.device("cpu")
        assert "29 parameters" in str(lockstep.explain(wrapper))

    launch(body)


def test_dtensors_are_no_concern_of_one_rank() -> None:
    def body(world: lockstep.World, mesh: DeviceMesh) -> None:
        grid = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "model"))
        model = tensor_parallel(grid["model"])
        assert lockstep.parallelize(model, process_group=grid.get_group("data")) is model
        x = torch.arange(8.0).view(2, 4).double()
        lockstep.mean(model(x).sum(1), process_group=grid.get_group("data")).backward()
        alone = divisible()
        alone(x).sum(1).mean().backward()
        assert_same(model.first.weight.grad.full_tensor(), alone.first.weight.grad)

    launch(body)


def test_values_that_are_divided_are_refused_with_what_to_give() -> None:
    def body(world: lockstep.World, mesh: DeviceMesh) -> None:
        for placement in (Shard(0), Replicate()):
            values = distribute_tensor(torch.arange(4.0).double(), mesh, [placement])
            for refuses in (
                lockstep.mean,
                lockstep.reduce,
                lambda values: lockstep.mean(torch.ones(4), weight=values),
            ):
                with pytest.raises(TypeError, match=r"a DTensor on .*full_tensor\(\)"):
                    refuses(values)

    launch(body)


def test_optimizers_of_dtensors_are_not_divided_once_more() -> None:
    def body(world: lockstep.World, mesh: DeviceMesh) -> None:
        parameters = [*sharded(mesh).parameters()]
        with pytest.raises(errors.AlreadyParallel, match="of this Adam is a DTensor on"):
            lockstep.shard_optimizer(torch.optim.Adam(parameters))
        with pytest.raises(ValueError, match=r"a DTensor on .* Use Adam itself"):
            lockstep.ZeroRedundancyOptimizer(parameters, torch.optim.Adam)

    launch(body)


def clipped(model: nn.Module, mean: Callable, clip: Callable, batches: Any) -> list[torch.Tensor]:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for x in batches:
        mean(model(x).square().sum(1)).backward()
        clip(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    parameters = (getattr(p, "full_tensor", lambda p=p: p)() for p in model.parameters())
    return [p.detach() for p in parameters]


def test_what_the_refusal_advises_trains_as_one_process() -> None:
    data = torch.arange(44.0).view(11, 4).double().cos()

    def body(world: lockstep.World, mesh: DeviceMesh) -> list[torch.Tensor]:
        loader = lockstep.DataLoader(data, batch_size=5)  # of the last batch, one rank has nothing
        return clipped(sharded(mesh), lockstep.mean, lockstep.clip_grad_norm_, loader)

    alone = clipped(divisible(), torch.mean, nn.utils.clip_grad_norm_, data.split(5))
    for found in launch(body):
        assert_same(found, alone)


def test_torchs_first_fsdp_is_refused() -> None:
    def body(world: lockstep.World, mesh: DeviceMesh) -> None:
        for original in (False, True):
            part = FullyShardedDataParallel(
                divisible(), use_orig_params=original, device_id=torch.device("cpu")
            )
            for refuses in (lockstep.parallelize, lockstep.average_gradients):
                for model, says in ((part, "it"), (nn.Sequential(part), "its part '0'")):
                    match = f"{says} is divided among ranks, as a FullySharded"
                    with pytest.raises(errors.AlreadyParallel, match=match):
                        refuses(model)

    launch(body)
