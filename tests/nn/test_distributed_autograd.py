"""Models whose graph goes over several processes: gradients that lockstep doesn't get to see."""

from __future__ import annotations

import logging.handlers
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lockstep

_models: list[nn.Module] = []


def loss_there(x: torch.Tensor) -> torch.Tensor:
    return _models[0](x).sum()


def begin_rpc(world: lockstep.World, path: str) -> None:
    from torch.distributed import rpc

    warnings.simplefilter("ignore")  # of torch's own
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{path}")
    rpc.init_rpc(f"rank{world.rank}", None, world.rank, world.world_size, options)


def refused_backwards(world: lockstep.World, path: str) -> tuple[list[float], dict[str, bool]]:
    from torch.distributed import autograd, rpc

    begin_rpc(world, path)
    model = lockstep.parallelize(nn.Sequential(nn.Linear(2, 1, bias=False)))
    _models[:] = [model]
    dist.barrier()  # the other rank may call it
    x = torch.full((1, 2), 1.0 + world.rank)
    other = f"rank{1 - world.rank}"
    earlier = model(x).sum()
    losses = {
        "the model": lambda: model(x).sum(),
        "a part": lambda: model[0](x).sum(),
        "an expression": lambda: (model[0].weight * x).sum(),
        "a forward before": lambda: earlier,
        "a forward elsewhere": lambda: rpc.rpc_sync(other, loss_there, args=(x,)),
    }
    refused, said = {}, logging.handlers.MemoryHandler(100)
    logging.getLogger("lockstep").addHandler(said)
    for name, loss in losses.items():
        with autograd.context() as context:
            try:
                autograd.backward(context, [loss()])
                refused[name] = False
            except RuntimeError as error:
                texts = [str(error), *(record.getMessage() for record in said.buffer)]
                refused[name] = any("keeps gradients to itself" in text for text in texts)
                said.buffer.clear()
    dist.barrier()
    model(x).sum().backward()
    rpc.shutdown()
    return model[0].weight.grad.flatten().tolist(), refused


@pytest.mark.forks
def test_distributed_autograd_is_refused(tmp_path: Path) -> None:
    results = lockstep.launch(refused_backwards, 2, args=(str(tmp_path / "store"),))
    for gradient, refused in results:
        assert gradient == [1.5, 1.5]
        assert all(refused.values()), refused


def steps_with_kept_gradients(world: lockstep.World, path: str, by_hand: bool) -> list[str]:
    from torch.distributed import autograd, rpc
    from torch.distributed.optim import DistributedOptimizer

    said = logging.handlers.MemoryHandler(100)
    logging.getLogger("lockstep").addHandler(said)
    model = lockstep.parallelize(nn.Sequential(nn.Linear(2, 1, bias=False)))
    begin_rpc(world, path)
    weight = model[0].weight
    refused = []
    for _ in range(2):
        try:
            with autograd.context() as context:
                autograd.backward(context, [model(torch.full((1, 2), 1.0 + world.rank)).sum()])
                if by_hand:
                    weight.grad = autograd.get_gradients(context)[weight]
                    torch.optim.NAdam([weight]).step()
                else:
                    DistributedOptimizer(torch.optim.NAdam, [rpc.RRef(weight)]).step(context)
        except RuntimeError as error:
            refused.append(str(error))
        dist.barrier()
    rpc.shutdown()
    return [*refused, *(record.getMessage() for record in said.buffer)]


@pytest.mark.forks
@pytest.mark.parametrize("by_hand", [False, True])
def test_steps_with_gradients_of_distributed_autograd_are_told_of(
    by_hand: bool, tmp_path: Path
) -> None:
    """RPC begins after the model is parallel, of which an optimizer is the first that tells."""
    args = str(tmp_path / "store"), by_hand
    for said in lockstep.launch(steps_with_kept_gradients, 2, args=args):
        assert sum("keeps gradients to itself" in text for text in said) == 2 - by_hand, said
        assert by_hand or "DistributedOptimizer steps its parameters, with NAdam" in said[0], said


def a_mean_in_a_context(world: lockstep.World, path: str) -> tuple[str, list[float]]:
    from torch.distributed import autograd, rpc

    model = lockstep.parallelize(nn.Linear(2, 1, bias=False))
    begin_rpc(world, path)
    x = torch.full((1, 2), 1.0 + world.rank)
    with autograd.context(), pytest.raises(lockstep.errors.ModelError) as refused:
        lockstep.mean(model(x))
    lockstep.mean(model(x)).backward()
    dist.barrier()
    rpc.shutdown()
    return str(refused.value), model.weight.grad.flatten().tolist()


@pytest.mark.forks
def test_a_mean_is_refused_where_distributed_autograd_would_keep_gradients(tmp_path: Path) -> None:
    """RPC begins after the model is parallel; what steps the parameters needn't be seen then."""
    args = (str(tmp_path / "store"),)
    for refused, gradient in lockstep.launch(a_mean_in_a_context, 2, args=args):
        assert "keeps gradients to itself" in refused
        assert gradient == [1.5, 1.5]
