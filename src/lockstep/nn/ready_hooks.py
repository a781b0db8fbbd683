"""The hooks by which autograd tells an engine of gradients that are ready."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from lockstep.comm import uncompiled
from lockstep.nn import autograd
from lockstep.torch_private import _current_graph_task_id


class HookedEngine(Protocol):
    """An engine, as its hooks see it."""

    gradient_ready: Any  # called with the engine and the parameter

    def pass_on_queued(self) -> None:
        """Pass queued gradients to the reducer."""


@dataclass
class ReadyQueue:
    """Gradients that are ready, but have not been passed to the reducer yet.

    Passing many at once is faster: between two calls, the reducer's memory falls out of the cores'
    caches. The first gradient of a backward, which begins it, is never queued.
    """

    # Autograd's task of the backward whose gradients may be queued.
    task: int | None = None
    # The number of queued gradients at which they are passed to the reducer.
    threshold: int = 1
    # Empty between backwards: hooks hold it, and parameters that hold themselves are never freed.
    parameters: list[torch.Tensor] = field(default_factory=list)


class ReadyHooks:
    """The hooks of one engine, which is held weakly by them.

    Attributes:
        queue: The gradients that the hooks have queued.
    """

    def __init__(self, engine: HookedEngine) -> None:
        self.queue = ReadyQueue()
        self._engine = weakref.ref(engine)
        self._hooks: list[tuple[autograd.GradientHooks, autograd.Hook]] = []
        self._hooks_of_others: list[dict[int, autograd.Hook]] = []
        # Held so that gradients are accumulated by these nodes, and handles of other hooks.
        self._nodes: list[Any] = []

    def attach(self, parameters: Sequence[nn.Parameter], frozen: Iterable[nn.Parameter]) -> None:
        """Register hooks on ``parameters``, and on ``frozen`` ones in case they are trained."""
        self.release()
        # The reducer doesn't know a parameter that is unfrozen later, so its gradient must not be
        # queued: its hook has a queue of its own, which no backward fills.
        for ones, queue in (parameters, self.queue), (frozen, ReadyQueue()):
            hook = _gradient_hook(self._engine, queue)
            self._hooks += [(autograd.hooks_of(parameter), hook) for parameter in ones]
        for hooks, hook in self._hooks:
            hooks.hold_back(hook)
        self._hooks_of_others = [hooks.others for hooks, _ in self._hooks]
        # All on one stream: shown by test_gradients_of_branches_on_two_streams.
        self._nodes = autograd.accumulators([p for p in parameters if p.device.type != "cpu"])

    def release(self) -> None:
        """Remove all hooks."""
        for hooks, hook in self._hooks:
            hooks.release(hook)
        self._hooks, self._hooks_of_others, self._nodes = [], [], []

    def refuse_distributed(self, parameters: Iterable[nn.Parameter]) -> None:
        """Let backwards of ``torch.distributed.autograd`` raise, as they don't call the hooks."""
        self._nodes += map(autograd.refuse_distributed, parameters)

    def call_others(self, parameters: Iterable[torch.Tensor]) -> None:
        """Call the program's hooks of ``parameters``, whose gradients have been reduced."""
        if any(self._hooks_of_others):
            with torch.no_grad():  # as autograd calls them
                for parameter in parameters:
                    autograd.hooks_of(parameter).call_others(parameter)


def _gradient_hook(engine: weakref.ref[HookedEngine], queue: ReadyQueue) -> autograd.Hook:
    # Local names are fast, and every gradient of every step passes here.
    current_task, parameters = _current_graph_task_id, queue.parameters

    @uncompiled
    def gradient_ready(parameter: torch.Tensor) -> None:
        if queue.task == current_task():
            parameters.append(parameter)
            if len(parameters) >= queue.threshold and (alive := engine()) is not None:
                alive.pass_on_queued()
        elif (alive := engine()) is not None:
            alive.gradient_ready(alive, parameter)
        else:
            hooks = autograd.hooks_of(parameter)
            hooks.release()
            hooks.call_others(parameter)

    return gradient_ready
