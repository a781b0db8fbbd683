"""The parameters that an engine takes from a module, and whether the module has others by now."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Collection, Sequence
from itertools import chain
from typing import Any

import torch.distributed as dist
from torch import nn

from lockstep.grad import gradient_dtype
from lockstep.torch_private import _BatchNorm

_dtype_of = operator.attrgetter("dtype")
_form_of = operator.attrgetter("shape", "dtype", "device")
_modules_of = operator.attrgetter("_modules")


def parameters_outside(
    module: nn.Module, inner: Collection[nn.Module], ignored: Collection[str]
) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters of ``module`` with names, but for ``ignored`` and ``inner`` ones'."""
    others = {id(p) for other in inner for p in other.parameters()}
    named = module.named_parameters()
    return [(n, p) for n, p in named if id(p) not in others and n not in ignored]


class TrackedParameters:
    """What a module, which is held weakly, had when its parameters were taken.

    Args:
        module: The module.
        named: Its parameters, with names.
        inner: Modules in it that have engines of their own.
        group: The group over which its gradients are reduced.

    Attributes:
        trained: The parameters that require gradients, with names.
        parameters: The same, without.
        frozen: Those that don't yet, and could.
        devices: The devices of the trained ones.
        sums_in_backward: Whether backwards have other collectives of the same group.
    """

    def __init__(
        self,
        module: nn.Module,
        named: Sequence[tuple[str, nn.Parameter]],
        inner: Collection[nn.Module],
        group: dist.ProcessGroup,
    ) -> None:
        self.trained = [(name, parameter) for name, parameter in named if parameter.requires_grad]
        self.parameters = [parameter for _, parameter in self.trained]
        self.frozen = [
            p for _, p in named if not p.requires_grad and (p.is_floating_point() or p.is_complex())
        ]
        self.devices = {parameter.device for parameter in self.parameters}
        self.sums_in_backward = _sums_in_backward(module, group)
        # What tells that something has changed.
        self._description = _describe(named)
        self._dtypes = [*map(_dtype_of, self.parameters)]
        self._forms = [*map(_form_of, self.parameters)]
        self.look_at_places(module, inner)

    def are_same(self, named: Sequence[tuple[str, nn.Parameter]]) -> bool:
        """Whether the parameters ``named`` are the same ones, of the same dtypes and devices."""
        return _describe(named) == self._description

    def new_among(self, named: Sequence[tuple[str, nn.Parameter]]) -> dict[str, nn.Parameter]:
        """Return those of the parameters ``named`` that the module did not have."""
        known = {key for key, *_ in self._description}
        return {name: p for name, p in named if id(p) not in known}

    def have_changed(self) -> bool:
        """Whether others of them may be trained, or they have other dtypes."""
        is_unfrozen = any(parameter.requires_grad for parameter in self.frozen)
        return is_unfrozen or [*map(_dtype_of, self.parameters)] != self._dtypes

    def have_other_forms(self) -> bool:
        """Whether the data of any that is trained has another shape, dtype or device."""
        return [*map(_form_of, self.parameters)] != self._forms

    def look_at_places(self, module: nn.Module, inner: Collection[nn.Module]) -> None:
        """Note what is where modules have parameters and modules.

        What is put there directly, as by conversions that overwrite parameters, calls no hook.
        """
        others = {each for one in inner for each in one.modules()}
        modules = [each for each in module.modules() if each not in others]
        modules = [each for each in modules if isinstance(each._modules, dict)]  # not scripted ones
        # Modules are held weakly: one of them may refer to the whole.
        self._weak_modules = [*map(weakref.ref, modules)]
        self._parameter_dicts = [each._parameters for each in modules]
        self._placed = self._in_places()

    def are_in_place(self) -> bool:
        """Whether the same parameters and modules are in these places."""
        return self._in_places() == self._placed

    def _in_places(self) -> list[int]:
        """Return the id() of each parameter and module, by place; nothing if a module is gone."""
        modules = [each() for each in self._weak_modules]
        if None in modules:
            return []
        dicts: list[Any] = [*self._parameter_dicts, *map(_modules_of, modules)]
        return [*map(id, chain.from_iterable(map(dict.values, dicts)))]


def _describe(named: Sequence[tuple[str, nn.Parameter]]) -> list[tuple[object, ...]]:
    """What a refresh depends on: id(), requires_grad, dtype and device of parameters."""
    return [(id(p), p.requires_grad, gradient_dtype(p), p.device) for _, p in named]


def sparse_indices(module: nn.Module, parameters: Sequence[nn.Parameter]) -> list[int]:
    """Return the indices of ``parameters`` of ``module`` that have sparse gradients."""
    tables = [each for each in module.modules() if isinstance(each, nn.Embedding | nn.EmbeddingBag)]
    sparse = {id(table.weight) for table in tables if table.sparse}
    return [index for index, parameter in enumerate(parameters) if id(parameter) in sparse]


def _sums_in_backward(module: nn.Module, group: dist.ProcessGroup) -> bool:
    """Whether a SyncBatchNorm in ``module``, ours or torch's, is over ``group`` itself."""
    norms = [vars(each) for each in module.modules() if isinstance(each, _BatchNorm)]
    groups = [norm["process_group"] for norm in norms if "process_group" in norm]
    return any((dist.group.WORLD if each is None else each) is group for each in groups)
