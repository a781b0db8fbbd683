"""The wrapper is an instance of torch's class, and has nothing of torch's mechanism."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import lockstep
from lockstep.errors import AlreadyParallel
from tests.nn.parallel import mean_gradients, net, parts
from tests.ranks import run_ranks
from tests.same import assert_same, gradients_of

OurDDP = lockstep.DistributedDataParallel

# What is torch's own and means the same here.
INHERITED = {
    "_active_ddp_module",
    "_check_reducer_finalized",
    "_get_active_ddp_module",
    "_get_data_parallel_params",
    "_register_fused_optim",
    "_set_ddp_sink_clone",
    "_set_params_and_buffers_to_ignore_for_model",
    "train",
    "will_sync_module_buffers",
}


def launch(body: Any, world_size: int = 2) -> list[Any]:
    return lockstep.launch(body, world_size, ranks="threads")


def test_a_wrapper_and_its_copies_are_instances_of_torchs_class() -> None:
    model = OurDDP(net())
    assert issubclass(OurDDP, TorchDDP)
    for one in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert isinstance(one, nn.parallel.DistributedDataParallel)


@pytest.mark.parametrize("name", sorted(name for name in vars(TorchDDP) if name[:2] != "__"))
def test_nothing_of_torchs_is_reached_but_what_means_the_same(name: str) -> None:
    model = OurDDP(net())
    owner = next(base for base in OurDDP.__mro__ if name in vars(base))
    if name in INHERITED:
        assert owner in (TorchDDP, nn.Module)
    elif hasattr(OurDDP, name):
        assert owner.__module__.startswith("lockstep.")
    else:
        with pytest.raises(AttributeError, match=name):
            getattr(model, name)


def test_methods_that_torchs_class_has_too_are_the_models() -> None:
    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)
            self._lazy_init = "mine"

        def gather(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) + 1

        scatter = _pre_forward = to_kwargs = gather

    inner = Graph()
    model = OurDDP(inner)
    x = torch.ones(1, 2)
    for name in ("gather", "scatter", "_pre_forward", "to_kwargs"):
        assert torch.equal(getattr(model, name)(x), inner.gather(x))
    assert model._lazy_init == "mine"
    model._lazy_init = model.gather = None
    assert inner._lazy_init is None
    assert inner.gather is None


def test_a_class_of_ones_own_may_add_what_it_likes() -> None:
    class Extra(nn.Module):
        def extra(self) -> str:
            return "extra"

    class Mine(OurDDP, Extra):
        def gather(self) -> str:
            return "mine"

    model = Mine(net())
    assert (model.extra(), model.gather()) == ("extra", "mine")
    assert not hasattr(model, "scatter")


def test_torchs_constructor_has_not_run() -> None:
    def body(world: lockstep.World) -> None:
        model = OurDDP(net())
        # torch's would have made its reducer's hooks fire in the first forward and backward.
        assert not isinstance(model.reducer, dist.Reducer)
        model(parts(2)[world.rank]).square().mean().backward()
        assert_same(gradients_of(model), mean_gradients(net(), parts(2)))

    launch(body)


def test_who_forwards_under_no_sync_may_ask_for_the_reduction_as_of_torchs() -> None:
    """As Accelerate and Lightning do: their own lines, for either wrapper."""

    def body(world: lockstep.World) -> None:
        for wrap in (TorchDDP, OurDDP):
            model = wrap(net(), find_unused_parameters=True)
            with model.no_sync():
                loss = model(parts(2)[world.rank]).square().mean()
                model.require_backward_grad_sync = model.require_forward_param_sync = True
                model.reducer._rebuild_buckets()
                model.reducer.prepare_for_backward([loss])
                loss.backward()
                model.require_backward_grad_sync = False
            assert_same(gradients_of(model), mean_gradients(net(), parts(2)))
            assert model.require_backward_grad_sync
            assert model.require_forward_param_sync

    launch(body)


def test_parameters_that_are_looked_after() -> None:
    for wrap in (TorchDDP, OurDDP):
        inner = net()
        wrap._set_params_and_buffers_to_ignore_for_model(inner, ["first.weight"])
        assert inner._ddp_params_and_buffers_to_ignore == ["first.weight"]
        known = [id(p) for p in wrap._get_data_parallel_params(inner)]
        assert known == [id(p) for p in inner.parameters() if p is not inner.first.weight]


def test_the_mesh_is_kept() -> None:
    def body(world: lockstep.World) -> None:
        mesh = init_device_mesh("cpu", (2,))
        assert OurDDP(net(), device_mesh=mesh).device_mesh is mesh
        assert not hasattr(OurDDP(net()), "device_mesh")

    launch(body)


def test_torchs_checkpoints_have_the_models_names() -> None:
    def body(world: lockstep.World) -> None:
        for wrap in (TorchDDP, OurDDP):
            inner = net()
            whole = nn.ModuleDict({"net": wrap(inner), "head": nn.Linear(2, 2).double()})
            model = whole["net"]
            optimizer = torch.optim.Adam(model.parameters())
            model(parts(2)[world.rank]).square().mean().backward()
            optimizer.step()
            state = get_model_state_dict(model)
            assert list(state) == list(inner.state_dict())
            assert "net.first.weight" in get_model_state_dict(whole)
            names = get_optimizer_state_dict(model, optimizer)["state"]
            assert set(names) <= set(inner.state_dict())
            set_model_state_dict(model, {name: value + 1 for name, value in state.items()})
            for name, value in inner.state_dict().items():
                assert torch.equal(value, state[name])  # which are the model's own tensors

    launch(body)


def test_a_stage_of_torchs_pipeline_is_reduced_with_its_last_micro_batch() -> None:
    def body(world: lockstep.World) -> list[torch.Tensor | None]:
        model = OurDDP(net())
        x = parts(2)[world.rank].repeat(2, 1)
        alone = dist.new_group([world.rank], use_local_synchronization=True)
        stage = PipelineStage(model, 0, 1, torch.device("cpu"), group=alone)
        loss = lambda output, target: (output - target).square().mean()  # noqa: E731
        Schedule1F1B(stage, 2, loss_fn=loss, scale_grads=True).step(
            x, target=torch.zeros(len(x), 1, dtype=torch.double)
        )
        return gradients_of(model)

    for mine in launch(body):
        assert_same(mine, mean_gradients(net(), parts(2)))


def test_torchs_wrapper_inside_is_refused_and_ours_is_not() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        part = OurDDP(net(), process_group=group)
        lockstep.parallelize(nn.Sequential(part, nn.Linear(1, 1).double()), process_group=group)
        theirs = TorchDDP(net(), process_group=group)
        with pytest.raises(AlreadyParallel, match="through torch"):
            OurDDP(theirs, process_group=group)

    run_ranks(2, body)
