"""Evaluations without a loader: a model that is trained is called in eval mode, without gradients.

While a context of ``no_grad()`` is open, a hook on all modules' calls waits for such a model, and
is taken away by its first call: modules' calls are otherwise as fast as without a trace.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lockstep import spans
from lockstep.comm import uncompiled

# What may switch gradients off.
CONTEXTS = (torch.no_grad, torch.inference_mode, torch.set_grad_enabled)


class EvaluationWatch:
    """Tells one rank's thread whether a context without gradients was an evaluation."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._trained: set[int] = set()  # by id(), the parameters of these
        self._context: object = None  # the outermost one that is open
        self._since = 0
        self._found = False
        self._handle: RemovableHandle | None = None

    def note(self, optimizer: Optimizer) -> None:
        """An optimizer has stepped, so that its parameters are trained."""
        if optimizer not in self._optimizers:
            self._optimizers.add(optimizer)
            self._trained |= {id(p) for group in optimizer.param_groups for p in group["params"]}

    def enter(self, context: object) -> None:
        """A context is entered."""
        if self._context is None and self._trained and not torch.is_grad_enabled():
            self._context, self._since, self._found = context, spans.now(), False
            self._handle = register_module_forward_pre_hook(self._called)

    def leave(self, context: object) -> int | None:
        """A context is left: return when it was entered if it was an evaluation."""
        if context is not self._context:
            return None
        self._context = None
        self._stop_waiting()
        return self._since if self._found else None

    @uncompiled
    def _called(self, module: nn.Module, inputs: object) -> None:
        if threading.get_ident() != self._thread:
            return
        if any(id(parameter) in self._trained for parameter in _some(module)):
            self._found = not module.training
            self._stop_waiting()

    def _stop_waiting(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None


def _some(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the module's first parameters, which tell whether it is trained."""
    for number, parameter in enumerate(module.parameters()):
        if number == 16:
            return
        yield parameter
