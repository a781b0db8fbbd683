"""Replicas in threads of this process."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn

from lockstep.nn.replicas.apply import on_device
from lockstep.nn.replicas.boundary import Gradients, add_up, call_replicas
from lockstep.nn.replicas.local import LocalReplicas, write_mean
from lockstep.nn.replicas.meeting import attending
from lockstep.nn.replicas.part import Arguments, Ends, Part, run_backward
from lockstep.nn.replicas.twins import trained_and_buffers
from lockstep.nn.replicas.workers import WorkerThreads, nothing, values_of


class ThreadReplicas:
    """A module's replicas, each with a thread of this process.

    Args:
        devices: Where they are; on the first is the module, too.
        averages_buffers: Whether buffers become the mean of what the replicas make of them.
    """

    def __init__(self, devices: Sequence[torch.device], *, averages_buffers: bool) -> None:
        self._averages_buffers = averages_buffers
        self._replicas = LocalReplicas(devices, owns_buffers=not averages_buffers)
        self._workers = WorkerThreads(len(devices))
        # What a call does to the replicas, another thread's must not do at the same time.
        self._lock = threading.RLock()

    def call(self, module: nn.Module, method: str, arguments: Sequence[Arguments]) -> list[Any]:
        """Call that method of as many replicas as there are ``arguments``, each on its own.

        Returns:
            What each has returned.
        """
        with self._lock:
            parameters, parts = self._replicas.parts(module, method, arguments)
            results = call_replicas(_ThreadCall(parts, parameters, self._workers, self._lock))
            if self._averages_buffers:
                self._average_buffers(module, len(arguments))
            return results

    def _average_buffers(self, module: nn.Module, count: int) -> None:
        for buffer in trained_and_buffers(list(module.modules()))[1]:
            write_mean(buffer, self._replicas.copies_of(buffer, count))


class _ThreadCall:
    """One call of all replicas, in their threads."""

    # The replicas' graphs are part of that of a derivative, and so not to be freed by a backward,
    # but when nobody has them any more. Shown by test_a_loss_and_its_gradient_in_one_backward.
    _shares_graph = False

    def __init__(
        self,
        parts: Sequence[Part],
        parameters: list[torch.Tensor],
        workers: WorkerThreads,
        lock: AbstractContextManager[bool],
    ) -> None:
        self.parameters = parameters
        self.inputs = [x for part in parts for x in part.inputs]
        self.results: list[Any] = []
        self._parts = parts
        self._homes = [parameter.device for parameter in parameters]
        self._devices = [part.device for part in parts]
        self._workers = workers
        self._lock = lock
        self._grad_mode = torch.is_grad_enabled()

    def forward(self) -> Sequence[tuple[torch.Tensor, bool]]:
        """Call all."""
        # What is inside of a Function finds grad mode off, and the replicas want the caller's.
        with torch.set_grad_enabled(self._grad_mode):
            self._run_forwards()
        self.results = [part.results for part in self._parts]
        for part in self._parts:
            part.results = None
        return [(output, output.requires_grad) for part in self._parts for output in part.outputs]

    def _run_forwards(self) -> None:
        tasks = [on_device(part.device, part.forward) for part in self._parts]
        values_of(self._workers.run(attending(tasks)), self._devices)

    def derivative(
        self, d_outputs: Sequence[torch.Tensor | None], *, keep_graph: bool
    ) -> Gradients:
        """Run the backward of all, as a call of theirs that has a backward itself."""
        mine = iter(d_outputs)
        parts = [part.derivative([next(mine) for _ in part.outputs]) for part in self._parts]
        self._shares_graph = True
        with self._lock:
            results = call_replicas(_Derivative(parts, self.parameters, self._workers, self._lock))
        if not keep_graph:
            for part in self._parts:
                part.forget()
        num = len(self.parameters)
        # What the first returns may be needed for its backward, and the sum is made in its place.
        first = [None if gradient is None else gradient.clone() for gradient in results[0][:num]]
        sums = add_up([first, *(own[:num] for own in results[1:])], self._homes)
        return [*sums, *(gradient for own in results for gradient in own[num:])]

    def backward(self, d_outputs: Sequence[torch.Tensor | None], *, keep_graph: bool) -> Gradients:
        """Run the backward of all."""
        mine = iter(d_outputs)
        with self._lock:
            ends = [part.ends([next(mine) for _ in part.outputs]) for part in self._parts]
            try:
                self._run_backwards(ends, keep_graph or self._shares_graph)
            finally:
                # Also those of a backward that failed: the next one is not to have them.
                taken = [part.take_gradients() for part in self._parts]
        if not keep_graph:
            for part in self._parts:
                part.forget()
        sums = add_up([of_parameters for of_parameters, _ in taken], self._homes)
        return [*sums, *(gradient for _, of_inputs in taken for gradient in of_inputs)]

    def _run_backwards(self, ends: Sequence[Ends], keep_graph: bool) -> None:
        on_cpu = [device.type == "cpu" for device in self._devices]
        tasks = [
            partial(run_backward, own if here else [], keep_graph)
            for own, here in zip(ends, on_cpu, strict=True)
        ]
        # Autograd has one thread for each accelerator, and this may be it: no other thread could
        # wait for it. A backward that is run from it goes on in it, and in those of the others.
        elsewhere = [end for own, here in zip(ends, on_cpu, strict=True) if not here for end in own]
        outcomes = self._workers.run(tasks, meanwhile=partial(run_backward, elsewhere, keep_graph))
        values_of(outcomes, self._devices)


class _Derivative(_ThreadCall):
    """The backwards of all replicas, as a call."""

    _shares_graph = True

    def _run_forwards(self) -> None:
        on_cpu = [device.type == "cpu" for device in self._devices]
        runs = [part.forward for part in self._parts]
        tasks = [run if here else nothing for run, here in zip(runs, on_cpu, strict=True)]
        elsewhere = [run for run, here in zip(runs, on_cpu, strict=True) if not here]

        def run_those_elsewhere() -> None:  # in this thread: see _run_backwards
            for run in elsewhere:
                run()

        values_of(self._workers.run(tasks, meanwhile=run_those_elsewhere), self._devices)
