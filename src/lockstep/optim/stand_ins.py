"""A copy of an optimizer with small parameters in place of its own, to try its steps on."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import CellType, FunctionType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

# At most this many parameters of a kind in a group, and parameters in all, are tried.
_NUM_OF_A_KIND, _NUM_IN_ALL = 2, 16
# Parameters with more elements are cut.
_NUMEL = 4096
# A learning rate for an optimizer whose own is 0, as at the start of a warm-up.
_LR = 1e-3


def choose(optimizer: Optimizer) -> list[list[torch.Tensor]]:
    """Return for each group the parameters to try: some of each kind, in two groups of a kind."""
    chosen: list[list[torch.Tensor]] = []
    seen: dict[Any, int] = defaultdict(int)
    for group in optimizer.param_groups:
        by_kind: dict[Any, list[torch.Tensor]] = defaultdict(list)
        for parameter in group["params"]:
            by_kind[_kind_of(parameter)].append(parameter)
        options = {name: str(value)[:40] for name, value in group.items() if name != "params"}
        sign = str(options), str([*by_kind])
        seen[sign] += 1
        tried = {id(p) for alike in by_kind.values() for p in alike[:_NUM_OF_A_KIND]}
        left = _NUM_IN_ALL - sum(map(len, chosen)) if seen[sign] < 3 else 0
        chosen.append([p for p in group["params"] if id(p) in tried][:left])
    return chosen


def _kind_of(parameter: torch.Tensor) -> Any:
    """Return what an optimizer may treat parameters by."""
    is_flat = tuple(size == 1 for size in parameter.shape)
    is_large = parameter.numel() > _NUMEL
    names = tuple(sorted(_attributes(parameter)))
    return parameter.dtype, parameter.device, is_flat, is_large, parameter.requires_grad, names


def _attributes(parameter: torch.Tensor) -> dict[str, Any]:
    """Return the attributes that a program has set on ``parameter``."""
    return {name: value for name, value in vars(parameter).items() if not name.startswith("_")}


class Copy:
    """A copy of an optimizer, on stand-ins for some of its parameters.

    Whatever refers to a parameter in the optimizer refers to its stand-in in the copy.

    Args:
        optimizer: The optimizer.
        chosen: For each group, the parameters that have stand-ins.
        dtype: The dtype of floating-point stand-ins and of state in their shape; by default those
            of the parameters.

    Attributes:
        optimizer: The copy.
        stand_ins: The stand-ins.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        chosen: Sequence[Sequence[torch.Tensor]],
        dtype: torch.dtype | None,
    ) -> None:
        self._dtype = dtype
        used = {id(p): p for tensors in chosen for p in tensors}
        every = {id(p): p for group in optimizer.param_groups for p in group["params"]}
        stand_ins: dict[int, torch.Tensor] = {
            key: self._stand_in(p) if key in used else torch.empty(0) for key, p in every.items()
        }
        self.stand_ins = [stand_ins[key] for key in used]
        self.optimizer: Optimizer = object.__new__(type(optimizer))
        memo: dict[int, Any] = {id(optimizer): self.optimizer, **stand_ins}
        self._copied = partial(_copied, memo=memo, places=stand_ins)
        attributes: Any = vars(self.optimizer)
        attributes["state"] = memo[id(optimizer.state)] = defaultdict(dict)
        attributes["param_groups"] = memo[id(optimizer.param_groups)] = [
            self._group(group, stand_ins, used) for group in optimizer.param_groups
        ]
        for key, value in optimizer.state.items():
            if id(key) in used:
                attributes["state"][stand_ins[id(key)]] = self._state(value, key)
            elif id(key) not in every:
                attributes["state"][key] = self._copied(value)
        for name, value in vars(optimizer).items():
            if name.endswith("_hooks"):  # torch's, of steps and state dicts
                attributes[name] = type(value)()
            elif name not in attributes and not _overrides(type(optimizer), name, value):
                attributes[name] = self._copied(value)

    def _stand_in(self, parameter: torch.Tensor) -> torch.Tensor:
        values = self._as_tried(parameter.detach(), parameter)
        made = values.clone(memory_format=torch.contiguous_format)
        if isinstance(parameter, nn.Parameter):
            made = nn.Parameter(made, parameter.requires_grad)
        else:
            made.requires_grad_(parameter.requires_grad)
        vars(made).update(_attributes(parameter))
        return made

    def _as_tried(self, value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        """Return ``value``, or if it is like ``parameter`` a part of it in the dtype to try."""
        if value.shape == parameter.shape:
            value = value[tuple(map(slice, _cut(parameter.shape)))]
        has_its_dtype = value.is_floating_point() and value.dtype is parameter.dtype
        return value.to(self._dtype) if has_its_dtype and self._dtype is not None else value

    def _group(
        self, group: dict[str, Any], stand_ins: Mapping[int, torch.Tensor], used: Mapping[int, Any]
    ) -> dict[str, Any]:
        options = {name: self._copied(v) for name, v in group.items() if name != "params"}
        options["params"] = [stand_ins[id(p)] for p in group["params"] if id(p) in used]
        if names := group.get("param_names"):
            pairs = zip(names, group["params"], strict=True)
            options["param_names"] = [name for name, p in pairs if id(p) in used]
        lr = options.get("lr")
        if isinstance(lr, torch.Tensor) and not lr.any():
            lr.fill_(_LR)
        elif isinstance(lr, float | int) and not lr:
            options["lr"] = float(options.get("initial_lr") or _LR)
        return options

    def _state(self, state: Any, parameter: torch.Tensor) -> Any:
        if not isinstance(state, dict):
            return self._copied(state)
        # A deep copy of a part of a tensor would be one of all its memory.
        return {
            name: self._as_tried(value, parameter).detach().clone()
            if isinstance(value, torch.Tensor)
            else self._copied(value)
            for name, value in state.items()
        }


def _cut(shape: Sequence[int]) -> list[int]:
    """Return a shape of at most ``_NUMEL`` elements, as square as may be."""
    sizes = [*shape]
    while torch.Size(sizes).numel() > _NUMEL:
        largest = max(range(len(sizes)), key=sizes.__getitem__)
        sizes[largest] = max(sizes[largest] // 2, 1)
    return sizes


def _overrides(kind: type[Optimizer], name: str, value: object) -> bool:
    """Whether it is a method that was replaced on the object, as a scheduler replaces step()."""
    return callable(value) and callable(getattr(kind, name, None))


def _copied(value: Any, memo: dict[int, Any], places: Mapping[int, torch.Tensor]) -> Any:
    """Return a deep copy, in which functions refer to copies, and ids to those of stand-ins."""
    if isinstance(value, FunctionType) and value.__closure__:
        cells = [CellType(_copied(cell.cell_contents, memo, places)) for cell in value.__closure__]
        code, names = value.__code__, value.__globals__
        return FunctionType(code, names, value.__name__, value.__defaults__, tuple(cells))
    if type(value) is dict and any(type(key) is int and key in places for key in value):
        copies = memo[id(value)] = {}
        for key, each in value.items():
            is_id = type(key) is int and key in places
            copies[id(places[key]) if is_id else copy.deepcopy(key, memo)] = _copied(
                each, memo, places
            )
        return copies
    try:
        return copy.deepcopy(value, memo)
    except Exception:
        if isinstance(value, nn.Module | torch.Tensor | list | dict | set | tuple | Iterator):
            raise
        return value  # such as a process group, a lock or a logger
