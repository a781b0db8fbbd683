"""What a guarded step may change, as it was before the step."""

from __future__ import annotations

import copy
import operator
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from lockstep.comm import without_repeats
from lockstep.generators import Generators, generators_of, global_generators
from lockstep.guarding.optimizer import KeptOptimizer
from lockstep.torch_private import _foreach_copy_

# To be mapped over tensors without a call in Python for each.
_shape_of, _dtype_of = operator.attrgetter("shape"), operator.attrgetter("dtype")


class ValueCopies:
    """Copies of the values of tensors, in memory that stays from one step to the next."""

    def __init__(self) -> None:
        self._tensors: list[torch.Tensor] = []
        self._copies: list[torch.Tensor] = []
        # By which the tensors are known to be those of the step before, and of the same form.
        self._plan: tuple[list[int], list[torch.Size], list[torch.dtype]] = [], [], []

    def keep(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy the values of ``tensors``."""
        with torch.no_grad():
            plan = [*map(id, tensors)], [*map(_shape_of, tensors)], [*map(_dtype_of, tensors)]
            if plan != self._plan:
                self._plan, self._tensors = plan, [*tensors]
                self._copies = [tensor.detach().clone() for tensor in tensors]
            elif tensors:
                _foreach_copy_(self._copies, self._tensors)

    def put_back(self) -> None:
        """Write the copied values to the tensors."""
        with torch.no_grad():
            for tensor, kept in zip(self._tensors, self._copies, strict=True):
                without_repeats(tensor.detach()).copy_(without_repeats(kept))


class StateBefore:
    """Models, optimizers and other things as they were before a step, to be put back.

    Args:
        models: Their parameters and buffers.
        optimizers: Their state and options.
        others: Modules, and objects with a state dict.
        copies: Memory for the values, of the step before.
        generators: The generators of random numbers, as the step before has found them.
        undoes: Whether the models' parameters and optimizers are kept; otherwise only buffers,
            random states and ``others`` are.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        others: Sequence[Any],
        copies: ValueCopies,
        generators: Generators,
        *,
        undoes: bool,
    ) -> None:
        roots = [*models, *(each for each in others if isinstance(each, nn.Module))]
        self._modules = [*dict.fromkeys(m for root in roots for m in root.modules())]
        self._optimizers = [KeptOptimizer(optimizer) for optimizer in optimizers if undoes]
        parameters = dict.fromkeys(p for m in self._modules for p in m._parameters.values())
        parameters.pop(None, None)
        self._parameters: list[Any] = [*parameters]  # of all modules
        if not undoes:
            of_models = {parameter for model in models for parameter in model.parameters()}
            parameters = dict.fromkeys(p for p in parameters if p not in of_models)
        self._others = [e for e in others if not isinstance(e, nn.Module | GradScaler)]
        self._scalers = [each for each in others if isinstance(each, GradScaler)]
        self._owners = optimizers
        self._copies, self._generators = copies, generators
        tensors: dict[int, Any] = {id(p): p for p in parameters}
        self._buffers = [
            (module._buffers, name, value)
            for module in self._modules
            for name, value in module._buffers.items()
        ]
        tensors |= {id(value): value for _, _, value in self._buffers if value is not None}
        for optimizer in self._optimizers:
            tensors |= {id(tensor): tensor for tensor in optimizer.keep()}
        self._scales = [
            (s._scale, s._growth_tracker)  # tensors, of which scalers make no other ones
            for s in self._scalers
        ]
        for pair in self._scales:
            tensors |= {id(tensor): tensor for tensor in pair if tensor is not None}
        self._copies.keep([*tensors.values()])
        self._states = [copy.deepcopy(each.state_dict()) for each in self._others]
        self._begin_generators()

    def put_back(self, *, keeps_scale: bool = False) -> None:
        """Put everything back; with ``keeps_scale`` not what a GradScaler has made of the step."""
        scales = [pair for pair in self._scales if keeps_scale]
        now = [(t, t.clone()) for pair in scales for t in pair if t is not None]
        for slot, name, value in self._buffers:
            slot[name] = value
        for optimizer in self._optimizers:
            optimizer.put_back()
        self._copies.put_back()
        for tensor, after in now:
            tensor.copy_(after)
        for scaler, (scale, tracker) in zip(self._scalers, self._scales, strict=True):
            if scale is None and not keeps_scale:  # it makes them with its first loss
                scaler._scale, scaler._growth_tracker = scale, tracker
            for owner in self._owners:
                scaler._per_optimizer_states.pop(id(owner), None)
        for each, state in zip(self._others, self._states, strict=True):
            each.load_state_dict(state)
        for generator in self._generators.values():
            generator.rewind()

    def _begin_generators(self) -> None:
        owners = [*self._owners, *self._modules]
        known, found = self._generators, generators_of(self._parameters, *map(vars, owners))
        are_same = all(
            name in known and known[name].generator is each.generator
            for name, each in found.items()
        )
        if not known or not are_same or ("numpy" in known) is not ("numpy" in sys.modules):
            known.clear()
            known.update(global_generators())
            known.update(found)
        else:
            for generator in known.values():
                generator.has_drawn()  # with which the next begin() reads less
        for generator in known.values():
            generator.begin()
