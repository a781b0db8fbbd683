"""An optimizer as it was before a step: its state, its options and the numbers that it keeps."""

from __future__ import annotations

import copy
import logging
from collections import deque
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from lockstep.errors import ModelError
from lockstep.generators import generator_of
from lockstep.optim import inner_optimizer, sharding_of
from lockstep.world import parameters_of

# What has no state, or can't be changed in place.
_PLAIN = (
    *(type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size),
    *(FunctionType, MethodType, BuiltinFunctionType, type, partial, Enum),
    *(dist.ProcessGroup, logging.Logger),
)
_FREQUENT = {type(None), bool, int, float, str}
# Attributes that are kept otherwise, or that no step makes wrong; and how torch's own ones begin,
# behind an underscore.
_APART = ("state", "param_groups", "defaults", "step")
_OF_TORCH = ("optimizer_", "opt_called", "zero_grad_profile_name")


class KeptOptimizer:
    """What an optimizer had at :meth:`keep`; the values of its tensors are kept by the caller."""

    def __init__(self, optimizer: Optimizer, known: set[int] | None = None) -> None:
        self._optimizer = optimizer
        # The optimizers that are kept already, and those that this one steps.
        self._known = set[int]() if known is None else known
        self._known.add(id(optimizer))
        self._inner: list[KeptOptimizer] = []

    def keep(self) -> list[torch.Tensor]:
        """Note what there is, and return the tensors whose values are to be kept.

        Raises:
            ModelError: If it has state of a class that can't be kept.
        """
        optimizer = self._optimizer
        tensors: list[torch.Tensor] = [*parameters_of(optimizer)]  # may be no model's
        # Not by the methods of a sharded optimizer's state, which refuse what other ranks have.
        items = [*dict.items(optimizer.state)]
        self._state = optimizer.state, {key: self._kept(each, tensors) for key, each in items}
        groups = optimizer.param_groups
        self._groups = groups, [*groups]
        options = [{n: value for n, value in group.items() if n != "params"} for group in groups]
        self._options = [self._kept(each, tensors) for each in options]
        self._parameters = [(group["params"], [*group["params"]]) for group in groups]
        self._attributes = {
            name: (value, self._kept(value, tensors))
            for name, value in vars(optimizer).items()
            if _is_kept(name)
        }
        sharding = sharding_of(optimizer)
        self._division = None if sharding is None else sharding.division
        if self._division is not None:
            self._shards = [(shard, shard.has_stepped) for shard in self._division.shards]
            tensors += [shard.tensor for shard, _ in self._shards if shard.has_master]
        return tensors

    def put_back(self) -> None:
        """Let the optimizer have again what it had; the caller puts the tensors' values back.

        Raises:
            ModelError: If the parameters of a sharded optimizer were divided anew since.
        """
        optimizer = self._optimizer
        optimizer.state, kept = self._state
        dict.clear(optimizer.state)
        dict.update(optimizer.state, kept)
        optimizer.param_groups, groups = self._groups
        optimizer.param_groups[:] = groups
        pairs = zip(groups, self._options, self._parameters, strict=True)
        for group, options, (parameters, before) in pairs:
            parameters[:] = before
            for name in group.keys() - options.keys() - {"params"}:
                del group[name]
            group.update(options, params=parameters)
        for name, (value, before) in self._attributes.items():
            vars(optimizer)[name] = _refilled(value, before)
        for name, value in [*vars(optimizer).items()]:
            if name not in self._attributes and _is_kept(name) and not callable(value):
                del vars(optimizer)[name]
        for inner in self._inner:
            inner.put_back()
        if self._division is not None:
            sharding = sharding_of(optimizer)
            if sharding is None or sharding.division is not self._division:
                raise ModelError(
                    f"This step has divided the parameters of {type(optimizer).__name__} anew, as "
                    "groups or parameters were changed before it, and so it can't be undone. Go "
                    "on from a checkpoint."
                )
            self._division.shards = [shard for shard, _ in self._shards]
            for shard, has_stepped in self._shards:
                shard.has_stepped = has_stepped
            self._division.repeats.doubt()

    def _kept(self, value: Any, tensors: list[torch.Tensor]) -> Any:
        """Return ``value`` with containers of its own, and the same tensors."""
        if isinstance(value, torch.Tensor):
            # Itself, by which the next step finds the memory of its copy.
            tensors.append(value if value.is_leaf else value.detach())
            return value
        if isinstance(value, Optimizer):
            held, value = value, inner_optimizer(value)
            if id(value) not in self._known:
                self._inner.append(KeptOptimizer(value, self._known))
                tensors += self._inner[-1].keep()
            return held
        if isinstance(value, nn.Module):
            tensors += [*value.parameters(), *value.buffers()]
            return value
        if type(value) is dict:  # as most are, of each parameter and group
            kept = value.copy()
            for key, each in value.items():
                if type(each) not in _FREQUENT:
                    kept[key] = self._kept(each, tensors)
            return kept
        if isinstance(value, dict):
            if type(value) is not dict and not value:
                return value  # as that which stands for the state of other ranks, and isn't copied
            kept = copy.copy(value)
            kept.update((key, self._kept(each, tensors)) for key, each in value.items())
            return kept
        if isinstance(value, list | deque):
            return type(value)(self._kept(each, tensors) for each in value)
        if isinstance(value, tuple):
            each = [self._kept(each, tensors) for each in value]
            return type(value)(*each) if hasattr(value, "_fields") else tuple(each)
        if isinstance(value, set | frozenset):
            for each in value:
                self._kept(each, tensors)
            return copy.copy(value)
        if isinstance(value, _PLAIN) or generator_of(value) is not None:
            return value
        raise ModelError(
            f"guard() can't keep the state of this {type(self._optimizer).__name__}, of which a "
            f"{type(value).__name__} is a part, to undo a step that fails in its update. Use "
            "guard(..., undo=False), with which such a failure ends the run."
        )


def _is_kept(name: str) -> bool:
    """Whether the attribute of that name is kept as it is."""
    return name not in _APART and not name.removeprefix("_").startswith(_OF_TORCH)


def _refilled(value: Any, before: Any) -> Any:
    """Return ``value`` with what it had ``before``; itself, as others may hold it, if it can be."""
    if isinstance(value, list | deque):
        value.clear()
        value.extend(before)
    elif isinstance(value, dict | set):
        value.clear()
        value.update(before)
    else:
        return before
    return value
