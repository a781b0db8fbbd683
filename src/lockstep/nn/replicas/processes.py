"""Replicas in processes of their own, where no other one holds up the interpreter."""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn

from lockstep.nn.replicas.apply import on_device
from lockstep.nn.replicas.boundary import Gradients, add_up, call_replicas
from lockstep.nn.replicas.crew import Crew
from lockstep.nn.replicas.local import LocalReplicas, write_mean
from lockstep.nn.replicas.meeting import mark_as_one
from lockstep.nn.replicas.messages import Backward
from lockstep.nn.replicas.modes import Modes
from lockstep.nn.replicas.part import Arguments, Ends, Part, run_backward
from lockstep.nn.replicas.tensors import map_tensors, tensors_in


class ProcessReplicas:
    """A module's replicas: the first in this process, each other in one of its own.

    They share the parameters, those on another device than the first excepted: on the CPU these are
    moved to memory that all have mapped when the processes start, with the first call. The
    processes are fresh ones, not forks, and end with this object or with the program.

    Args:
        devices: One for each replica: CPUs, or CUDA devices; on the first is the module, too.
        averages_buffers: Whether buffers become the mean of what the replicas make of them.
        timeout: How many seconds to wait for what a process is to do.
    """

    def __init__(
        self, devices: Sequence[torch.device], *, averages_buffers: bool, timeout: float
    ) -> None:
        self._devices, self._timeout = list(devices), timeout
        self._averages_buffers = averages_buffers
        self._first = LocalReplicas(self._devices[:1], owns_buffers=not averages_buffers)
        self._crew: Crew | None = None
        self._lock = threading.RLock()

    def call(self, module: nn.Module, method: str, arguments: Sequence[Arguments]) -> list[Any]:
        """Call that method of as many replicas as there are ``arguments``, each on its own.

        Returns:
            What each has returned.

        Raises:
            ReplicaLost: If a process has ended, or doesn't answer within the timeout.
            TypeError: If the module or the arguments can't be pickled.
        """
        with self._lock:
            # Those of the process that this one was forked from are its own.
            if self._crew is None or not self._crew.is_alive or self._crew.pid != os.getpid():
                self._crew = Crew(self._devices, self._timeout)
            self._crew.take(module)
            call = _ProcessCall(self._crew, self._lock, self._first, module, method, arguments)
            results = call_replicas(call)
            if self._averages_buffers:
                self._average_buffers(self._crew)
            return results

    def _average_buffers(self, crew: Crew) -> None:
        copies = [self._first.copies_of(buffer, 1)[0] for buffer in crew.buffers]
        pairs = enumerate(zip(copies, crew.buffers, strict=True))
        changed = [index for index, (mine, buffer) in pairs if not torch.equal(mine, buffer)]
        for index, values in crew.changed_buffers(changed).items():
            write_mean(crew.buffers[index], [copies[index], *values])


class _ProcessCall:
    """One call of all replicas, in their processes."""

    _first: Part  # since forward

    def __init__(
        self,
        crew: Crew,
        lock: AbstractContextManager[bool],
        replicas: LocalReplicas,
        module: nn.Module,
        method: str,
        arguments: Sequence[Arguments],
    ) -> None:
        self.parameters = crew.parameters
        self.inputs = [t for own in arguments for t in tensors_in(own) if t.requires_grad]
        self.results: list[Any] = []
        self._homes = [parameter.device for parameter in self.parameters]
        self._crew = crew
        self._lock = lock
        self._to_call = partial(replicas.parts, module, method, arguments[:1])
        self._method = method
        self._arguments = arguments[1:]
        self._modes = Modes.here()
        self._number = -1
        # How many tensors each of the others has returned.
        self._num_outputs: list[int] = []
        # The first one's gradients of the backward that runs, of parameters and inputs.
        self._taken: tuple[Gradients, Gradients] | None = None

    def forward(self) -> Sequence[tuple[torch.Tensor, bool]]:
        """Call all."""
        with torch.set_grad_enabled(self._modes.grad):  # a Function finds it off
            self._number, answers = self._crew.call(
                self._method, self._arguments, self._modes, self._call_first
            )
        if self._modes.grad:
            drop = partial(self._crew.drop, self._number, len(answers))
            weakref.finalize(self, drop).atexit = False
        del self._to_call, self._arguments
        self.results, self._first.results = [self._first.results], None
        outputs = [(output, output.requires_grad) for output in self._first.outputs]
        for answer in answers:
            mine: list[torch.Tensor] = []
            self.results.append(map_tensors(lambda t: _kept(t, mine), answer.results))  # noqa: B023 - called at once
            for output, is_one in zip(mine, answer.are_one, strict=True):
                if is_one:
                    mark_as_one(output)
            self._num_outputs.append(len(mine))
            outputs += zip(mine, answer.require_grad, strict=True)
        return outputs

    def _call_first(self) -> None:
        """Call the first replica, while the others are on their way."""
        _, (self._first,) = self._to_call()
        on_device(self._first.device, self._first.forward)()

    def backward(self, d_outputs: Sequence[torch.Tensor | None], *, keep_graph: bool) -> Gradients:
        """Run the backward of all."""
        given = iter(d_outputs)
        of_first = list(itertools.islice(given, len(self._first.outputs)))
        messages = [
            Backward(self._number, list(itertools.islice(given, count)), keep_graph)
            for count in self._num_outputs
        ]
        ends = self._first.ends(of_first)
        with self._lock:
            try:
                parts, of_inputs = self._crew.backward(
                    messages, lambda: self._run_first(ends, keep_graph)
                )
            finally:
                # Also those of a backward that failed: the next one is not to have them.
                mine, of_own_inputs = self._taken or self._first.take_gradients()
                self._taken = None
            if not keep_graph:
                self._first.forget()
            sums = add_up([mine, *parts], self._homes)
        return [*sums, *of_own_inputs, *(gradient for own in of_inputs for gradient in own)]

    def derivative(
        self, d_outputs: Sequence[torch.Tensor | None], *, keep_graph: bool
    ) -> Gradients:
        """The same gradients, which say what to do when they are differentiated."""
        gradients = self.backward(d_outputs, keep_graph=keep_graph)
        there = [gradient for gradient in gradients if gradient is not None]
        # They depend on these, and so autograd comes by. Shown by
        # test_a_second_derivative_of_processes_says_what_can_be_used_instead.
        sources = (*self.parameters, *self.inputs, *d_outputs)
        refusing = iter(_NotTwice.apply(len(there), *there, *sources))  # type: ignore[no-untyped-call]
        return [None if gradient is None else next(refusing) for gradient in gradients]

    def _run_first(self, ends: Ends, keep_graph: bool) -> Gradients:
        """Run the backward of the first replica; return its gradients of the parameters."""
        run_backward(ends, keep_graph)
        self._taken = self._first.take_gradients()
        return self._taken[0]


def _kept(tensor: torch.Tensor, into: list[torch.Tensor]) -> torch.Tensor:
    into.append(tensor)
    return tensor


class _NotTwice(torch.autograd.Function):
    """Gradients, as a function of what they depend on, that can't be differentiated."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: torch.Tensor | None) -> tuple[Any, ...]:
        return tuple(None if t is None else t.detach() for t in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor | None) -> None:
        raise RuntimeError(
            "A gradient that came out of replicas in processes is to be differentiated again, "
            "which those in threads alone can: lockstep.DataParallel(..., workers='threads')."
        )
