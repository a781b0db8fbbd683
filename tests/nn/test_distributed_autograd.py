"""Models whose graph goes over several processes: gradients that lockstep doesn't get to see."""

from __future__ import annotations

import contextlib
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import lockstep
from lockstep.errors import ModelError


def refused_in_a_context(world: lockstep.World, path: str) -> tuple[list[float], list[bool]]:
    from torch.distributed import autograd, rpc

    warnings.simplefilter("ignore")  # of torch's own
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{path}")
    rpc.init_rpc(f"rank{world.rank}", None, world.rank, world.world_size, options)
    model = lockstep.parallelize(nn.Sequential(nn.Linear(2, 1, bias=False)))
    x = torch.full((1, 2), 1.0 + world.rank)
    refused = []
    for method in (model, model[0]):
        with autograd.context(), contextlib.suppress(ModelError):
            refused.append(True)
            method(x)
            refused[-1] = False
    with autograd.context(), torch.no_grad():
        model(x)
    model(x).sum().backward()
    rpc.shutdown()
    return model[0].weight.grad.flatten().tolist(), refused


@pytest.mark.forks
def test_distributed_autograd_is_refused(tmp_path: Path) -> None:
    results = lockstep.launch(refused_in_a_context, 2, args=(str(tmp_path / "store"),))
    assert results == [([1.5, 1.5], [True, True])] * 2


def refused_once_rpc_has_begun(world: lockstep.World, path: str) -> bool:
    from torch.distributed import autograd, rpc

    warnings.simplefilter("ignore")  # of torch's own
    model = lockstep.parallelize(nn.Linear(2, 1))
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{path}")
    rpc.init_rpc(f"rank{world.rank}", None, world.rank, world.world_size, options)
    x = torch.ones(1, 2)
    refused = False
    with autograd.context():
        try:
            model(x)
        except ModelError:
            refused = True
    rpc.shutdown()
    return refused


@pytest.mark.long
def test_it_is_refused_if_rpc_begins_later(tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    assert lockstep.launch(refused_once_rpc_has_begun, 2, args=(path,)) == [True, True]
