"""The hooks by which autograd tells an engine of gradients that are ready."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from lockstep.comm import uncompiled
from lockstep.nn import autograd
from lockstep.torch_private import _current_graph_task_id, _get_sequence_nr


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

    Note [Gradients that queue themselves]: a call in Python for each gradient takes longer than all
    that the reducer does with it. So where gradients are expected to come in their order, autograd
    calls ``append()`` of the queue, and Python only where a chunk of them ends. Then nobody sees
    that a gradient is of a nested backward, to which this one may add again. A nested backward
    needs a graph, as a rule one that it has just made (reentrant checkpoints). So if this thread
    has made any, gradients wait for their bucket, and don't queue themselves any more. Else, if the
    gradient has been copied by then, that is a LateGradient. Shown by
    test_reentrant_checkpoints_may_begin_after_other_steps.

    Attributes:
        queue: The gradients that the hooks have queued.
    """

    def __init__(self, engine: HookedEngine) -> None:
        self.queue = ReadyQueue()
        self._engine = weakref.ref(engine)
        # What autograd calls for gradients with which chunks end, and for all others: the same, or
        # append(). And the parameters of those ends.
        self._each = _gradient_hook(self._engine, self.queue)
        self._most: partial[object] = partial(self._each)
        self._ends: Sequence[torch.Tensor] = ()
        # How many nodes this thread had made when gradients began to queue themselves; None if they
        # don't. And whether it has made some in such a backward.
        self._num_nodes: int | None = None
        self._makes_graphs = False
        self._hooks: dict[int, tuple[autograd.GradientHooks, autograd.Hook]] = {}
        self._hooks_of_others: list[dict[int, autograd.Hook]] = []
        # Held so that gradients are accumulated by these nodes, and handles of other hooks.
        self._nodes: list[Any] = []

    def attach(self, parameters: Sequence[nn.Parameter], frozen: Iterable[nn.Parameter]) -> None:
        """Register hooks on ``parameters``, and on ``frozen`` ones in case they are trained."""
        self.release()
        self._ends, self._makes_graphs = (), False
        for parameter in parameters:
            self._hold_back(parameter, self._most)
        self.attach_unknown(frozen)
        self.renew_nodes(parameters)

    def attach_unknown(self, parameters: Iterable[nn.Parameter]) -> None:
        """Register hooks on ``parameters`` that the reducer doesn't know.

        Their gradients must not be queued, and the hooks have a queue that no backward fills.
        """
        hook = _gradient_hook(self._engine, ReadyQueue())
        for parameter in parameters:
            self._hold_back(parameter, hook)
        self._hooks_of_others = [hooks.others for hooks, _ in self._hooks.values()]

    def renew_nodes(self, parameters: Sequence[nn.Parameter]) -> None:
        """Hold what accumulates gradients of ``parameters`` in the forms that they have now."""
        # All on one stream: shown by test_gradients_of_branches_on_two_streams.
        self._nodes = []
        self._nodes = autograd.accumulators([p for p in parameters if p.device.type != "cpu"])

    def _hold_back(self, parameter: torch.Tensor, hook: autograd.Hook) -> None:
        hooks = autograd.hooks_of(parameter)
        hooks.hold_back(hook)
        self._hooks[id(parameter)] = hooks, hook

    def release(self) -> None:
        """Remove all hooks."""
        for hooks, hook in self._hooks.values():
            hooks.release(hook)
        self._hooks, self._hooks_of_others, self._nodes = {}, [], []

    def open_queue(self, task: int | None, ends: Sequence[torch.Tensor] | None) -> None:
        """Let gradients of autograd's ``task`` be queued: by append() alone, but for ``ends``."""
        self.queue.task, self.queue.threshold = task, 1
        if ends is None or task is None or self._makes_graphs:
            return
        if ends is not self._ends:
            for hook, ones in (self._most, self._ends), (self._each, ends):
                for parameter in ones:
                    self._hold_back(parameter, hook)
            self._ends = ends
        self._num_nodes = _get_sequence_nr()
        _set_function(self._most, self.queue.parameters.append)

    def close_queue(self) -> None:
        """Let no gradient queue any more: the backward is over."""
        self.queue.task = self._num_nodes = None
        _set_function(self._most, self._each)

    @property
    def queue_themselves(self) -> bool:
        """Whether most gradients queue themselves."""
        return self._num_nodes is not None

    def may_have_queued_nested(self) -> bool:
        """Whether gradients that have queued themselves may be those of a nested backward."""
        if self._num_nodes in (None, _get_sequence_nr()):
            return False
        self._makes_graphs, self._num_nodes = True, None
        _set_function(self._most, self._each)
        return True

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


def _set_function(hook: Any, function: autograd.Hook) -> None:
    """Let ``hook``, a partial object that autograd has for many parameters, call ``function``."""
    hook.__setstate__((function, (), {}, None))
