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


def refused_backwards(
    world: lockstep.World, path: str, begins: str
) -> tuple[list[float], dict[str, bool]]:
    from torch.distributed import autograd, rpc

    warnings.simplefilter("ignore")  # of torch's own
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{path}")
    place = (f"rank{world.rank}", None, world.rank, world.world_size, options)
    if begins == "before":
        rpc.init_rpc(*place)
    model = lockstep.parallelize(nn.Sequential(nn.Linear(2, 1, bias=False)))
    if begins == "after":
        rpc.init_rpc(*place)
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
@pytest.mark.parametrize("begins", ["before", pytest.param("after", marks=pytest.mark.long)])
def test_distributed_autograd_is_refused(begins: str, tmp_path: Path) -> None:
    """RPC begins before the model is parallel, or after."""
    results = lockstep.launch(refused_backwards, 2, args=(str(tmp_path / "store"), begins))
    for gradient, refused in results:
        assert gradient == [1.5, 1.5]
        assert all(refused.values()), refused
