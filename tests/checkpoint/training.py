"""Models that have been trained, with all that a checkpoint keeps, and whether two are the same."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

import lockstep
from tests.training import train


def bits(tensor: torch.Tensor) -> tuple[object, ...]:
    """What a tensor is, with its bytes, so that NaNs are equal to themselves."""
    plain = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.detach().reshape(-1))
    return tensor.dtype, tuple(tensor.shape), bytes(plain.view(torch.uint8).tolist())


def same(a: Any, b: Any) -> bool:
    """Whether two trees are of the same types and have the same values and bits."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return bits(a) == bits(b)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return len(a) == len(b) and all(
            same(x, y) for pair in zip(a.items(), b.items(), strict=True) for x, y in [pair]
        )
    if isinstance(a, deque) and a.maxlen != b.maxlen:
        return False
    if isinstance(a, list | tuple | deque):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b or (a != a and b != b)


def trained(
    group: dist.ProcessGroup | None,
    kind: type[nn.Module],
    make: Any,
    *,
    sharded: bool = False,
    master: torch.dtype | None = None,
    steps: int = 3,
    dtype: torch.dtype = torch.float32,
) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model: nn.Module = kind().to(dtype)
    if group is not None:
        model = lockstep.parallelize(model, process_group=group)
    optimizer = make(model.parameters())
    if sharded:
        lockstep.shard_optimizer(optimizer, master_dtype=master)
    train(model, optimizer, batches(model, range(steps)))
    return model, optimizer


def batches(model: nn.Module, steps: range) -> Iterator[torch.Tensor]:
    for step in steps:
        x = torch.randn(4, *model.sample, generator=torch.Generator().manual_seed(step))
        yield x.to(next(model.parameters()).dtype)


def states_of(model: nn.Module, optimizer: Optimizer) -> tuple[dict[str, Any], dict[str, Any]]:
    """Their state dicts, with parameters in order, which those of sharded optimizers aren't."""
    state = optimizer.state_dict()
    entries = {i: dict(sorted(state["state"][i].items())) for i in sorted(state["state"])}
    return dict(model.state_dict()), state | {"state": entries}
