"""Steps of a sharded optimizer that a rank without data takes with the others, in join()."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from lockstep.comm import all_gather_json, broadcast_tensors
from lockstep.grad import lacks_gradient


def take_options(optimizer: Optimizer, process_group: dist.ProcessGroup, first: int) -> None:
    """Copy the options of rank ``first`` that are numbers, such as learning rates."""
    groups = optimizer.param_groups
    numbers = [{name: float(v) for name, v in group.items() if _is_number(v)} for group in groups]
    for group, options in zip(groups, all_gather_json(process_group, numbers)[first], strict=True):
        for name, number in options.items():
            if isinstance(group[name], torch.Tensor):
                group[name].fill_(number)
            elif float(group[name]) != number:
                group[name] = type(group[name])(number)


def take_gradients(
    parameters: Sequence[nn.Parameter], process_group: dist.ProcessGroup, first: int
) -> None:
    """Copy the gradients of rank ``first``, whose program may have clipped them."""
    lacks = all_gather_json(process_group, [*map(lacks_gradient, parameters)])[first]
    for parameter, has_none in zip(parameters, lacks, strict=True):
        if has_none or lacks_gradient(parameter):
            parameter.grad = None if has_none else torch.empty_like(parameter)
    gradients = [parameter.grad for parameter in parameters]
    broadcast_tensors(process_group, [g for g in gradients if g is not None], first)


def _is_number(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, int | float)
