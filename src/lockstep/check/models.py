"""The models of a program, and names for all tensors in them that are the same in every run."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lockstep.check.switches import Switches
from lockstep.nn import TORCHS_WRAPPERS


class Models:
    """All modules that the program makes, in the order in which it makes them."""

    def __init__(self) -> None:
        self._made: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()
        self._count = 0

    def watch(self, switches: Switches) -> None:
        """Note modules from now on: those that are made, and copies of them."""
        switches.wrap(nn.Module, "__init__", self._note)
        switches.wrap(nn.Module, "__setstate__", self._note)

    def _note(
        self, original: Callable[..., None], module: nn.Module, *args: Any, **options: Any
    ) -> None:
        original(module, *args, **options)
        self._count += 1
        self._made[self._count] = module

    def modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Outermost modules with tensors, by names: of their class, with a number if it's needed.

        Wrappers are left out: a program may put one around its model on several ranks alone.
        """
        made = [self._made[number] for number in sorted(self._made.keys())]
        made = [module for module in made if hasattr(module, "_modules")]
        inner = {child for module in made if not _is_wrapper(module) for child in module.children()}
        numbers: Counter[str] = Counter()
        for module in made:
            has_tensors = any(True for _ in _tensors(module))
            if not _is_wrapper(module) and module not in inner and has_tensors:
                name = type(module).__name__
                numbers[name] += 1
                yield name + (f"#{numbers[name]}" if numbers[name] > 1 else ""), module

    def tensors(self, optimizer: Optimizer) -> dict[str, torch.Tensor]:
        """Parameters and buffers of all models by name; and what else ``optimizer`` changes."""
        roots = list(self.modules())
        found: dict[str, torch.Tensor] = {}
        seen: set[int] = set()
        for root, module in roots:
            for name, tensor in _tensors(module):
                if id(tensor) not in seen and not is_lazy(tensor):
                    seen.add(id(tensor))
                    found[name if len(roots) == 1 else f"{root}.{name}"] = tensor
        for number, group in enumerate(optimizer.param_groups):
            for index, tensor in enumerate(group["params"]):
                if id(tensor) not in seen:
                    found[f"param_groups[{number}]['params'][{index}]"] = tensor
        return found

    def has_wrapper(self) -> bool:
        """Whether there is a DistributedDataParallel."""
        wrapper = nn.parallel.DistributedDataParallel
        return any(isinstance(module, wrapper) for module in list(self._made.values()))


def _is_wrapper(module: nn.Module) -> bool:
    return isinstance(module, TORCHS_WRAPPERS) or type(module).__name__ == "OptimizedModule"


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()
