"""The replicas of a module, in threads, as one autograd Function.

Autograd runs the backward of all CPU operations of one graph in one thread. So each replica has a
graph of its own, in which its inputs and parameters are leaves. In the caller's graph all replicas
are one Function, whose backward runs the replicas' backwards in parallel and sums their gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import compress, islice
from typing import Any

import torch
from torch import nn

from lockstep.comm import uncompiled
from lockstep.nn.autograd import as_backward_of_replicas
from lockstep.nn.parallel_state import remember_reached
from lockstep.nn.replicas.devices import move, on_device
from lockstep.nn.replicas.group import as_replicas, is_one, mark_as_one, refuse_forward_mode
from lockstep.nn.replicas.kept_replica import (
    Arguments,
    Gradients,
    KeptReplica,
    ReplicaCall,
    run_backward,
)
from lockstep.nn.replicas.module_copy import ModuleState, check_home
from lockstep.nn.replicas.nested import map_tensors, tensors_in
from lockstep.nn.replicas.worker_threads import WorkerThreads, nothing, raise_first
from lockstep.torch_private import _foreach_add_, _get_current_graph_task_keep_graph

Task = Callable[[], object]


class Replicas:
    """A module's replicas, the first in the caller's thread, each other in a thread of its own.

    The module is on the first of ``devices``.
    """

    def __init__(self, devices: Sequence[torch.device], *, averages_buffers: bool) -> None:
        self._devices = devices
        self._averages_buffers = averages_buffers
        self._replicas: list[KeptReplica] = []
        self._workers = WorkerThreads(len(devices))

    def call(self, module: nn.Module, method: str, arguments: Sequence[Arguments]) -> list[Any]:
        """Call ``method`` of one replica for each of ``arguments``; return their results."""
        with self._workers.lock, self._workers.sharing():
            state = ModuleState.of(module)
            check_home([*state.parameters, *state.buffers], self._devices[0])
            refuse_forward_mode(state.parameters, state.buffers, arguments)
            replicas = self._update(module, state, len(arguments))
            calls = [
                ReplicaCall(one.device, one.leaves, getattr(one.module, method), given)
                for one, given in zip(replicas, arguments, strict=True)
            ]
            results = _with_backward(_Call(calls, state.parameters, self._workers))
            if self._averages_buffers:
                copies = zip(*(replica.buffers for replica in replicas), strict=True)
                for buffer, values in zip(state.buffers, copies, strict=True):
                    _write_mean(buffer, values)
            return results

    def _update(self, module: nn.Module, state: ModuleState, count: int) -> list[KeptReplica]:
        """Update the first ``count`` replicas to ``state``; return them."""
        if not self._replicas or self._replicas[0].modules != state.modules:
            self._replicas = [
                KeptReplica(module, device, shares_buffers=not (self._averages_buffers or index))
                for index, device in enumerate(self._devices)
            ]
        replicas = self._replicas[:count]
        for replica in replicas:
            replica.update(state)
        return replicas


def _write_mean(buffer: torch.Tensor, values: Sequence[torch.Tensor]) -> None:
    """Write the mean of the replicas' ``values`` to a floating-point buffer, to others the first.

    A buffer that no replica has changed is not written to, and so keeps its bits.
    """
    there = [value.to(buffer.device) for value in values]
    # Compare values, as some writes don't increment the tensor's version.
    if not all(torch.equal(value, buffer) for value in there):
        with torch.no_grad():
            buffer.copy_(torch.stack(there).mean(0) if buffer.is_floating_point() else there[0])


@dataclass(eq=False, repr=False)
class _Call:
    """One call of all replicas, as a function from parameters and inputs to outputs."""

    calls: Sequence[ReplicaCall]
    parameters: list[torch.Tensor]
    workers: WorkerThreads
    is_derivative: bool = False  # whether the calls are backwards, for a double backward
    # The replicas' results, whose tensors have no other reference, and how many tensors each has.
    results: list[Any] = field(default_factory=list)
    num_outputs: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.inputs = [x for call in self.calls for x in call.inputs]
        # After a double backward, the replicas' graphs are part of the derivative's graph. A
        # backward must not free them; the last reference does. Shown by
        # test_a_loss_and_its_gradient_in_one_backward.
        self._shares_graph = self.is_derivative

    def forward(self) -> list[torch.Tensor]:
        """Call all replicas; return the tensors in ``results``."""
        if self.is_derivative:
            elsewhere = [call for call in self.calls if call.device.type != "cpu"]
            here = [nothing if call in elsewhere else call.forward for call in self.calls]

            def run_elsewhere() -> None:  # see backward()
                for call in elsewhere:
                    call.forward()

            self._run(here, run_elsewhere)
        else:
            self._run(as_replicas([on_device(call.device, call.forward) for call in self.calls]))
        outputs: list[torch.Tensor] = []
        for call in self.calls:
            tensors = tensors_in(call.results)
            self.results.append(call.results)
            self.num_outputs.append(len(tensors))
            outputs += tensors
            call.results = None
        return outputs

    def _run(self, tasks: Sequence[Task], meanwhile: Task = nothing) -> None:
        futures = self.workers.run(tasks, meanwhile)
        raise_first([each.exception() for each in futures], [call.device for call in self.calls])

    def backward(self, d_outputs: Sequence[torch.Tensor | None], *, keep_graph: bool) -> Gradients:
        """Run all backwards; return the gradients of ``parameters`` and ``inputs``."""
        keeps = keep_graph or self._shares_graph
        with self.workers.lock, self.workers.sharing():
            try:
                tasks: list[Task] = []
                elsewhere: list[tuple[torch.Tensor, torch.Tensor]] = []
                for call, gradients in zip(self.calls, self._split(d_outputs), strict=True):
                    ends = call.start_backward(gradients)
                    if call.device.type == "cpu":
                        tasks.append(partial(run_backward, ends, keeps))
                    else:
                        tasks.append(nothing)
                        elsewhere += ends

                # Autograd has one thread per accelerator. If this is one of them, a backward in a
                # worker thread would wait for it forever; a backward that is started here is run by
                # this thread and those of the other accelerators.
                self._run(tasks, partial(run_backward, elsewhere, keeps))
            finally:
                # Also after a failed backward: its gradients must not be added to the next one's.
                taken = [call.take_gradients() for call in self.calls]
            if not keep_graph:
                for call in self.calls:
                    call.free_graph()
        sums = add_up([gradients for gradients, _ in taken], self.calls[0].device)
        return [*sums, *(gradient for _, of_inputs in taken for gradient in of_inputs)]

    def _split(self, d_outputs: Sequence[torch.Tensor | None]) -> list[Gradients]:
        """Split the gradients of all outputs by replica."""
        given = iter(d_outputs)
        return [list(islice(given, count)) for count in self.num_outputs]

    def derivative(
        self, d_outputs: Sequence[torch.Tensor | None], *, keep_graph: bool
    ) -> Gradients:
        """Run :meth:`backward` with ``create_graph``, so that the gradients have a backward."""
        calls = [
            call.derivative(gradients)
            for call, gradients in zip(self.calls, self._split(d_outputs), strict=True)
        ]
        self._shares_graph = True
        derivative = _Call(calls, self.parameters, self.workers, is_derivative=True)
        with self.workers.lock, self.workers.sharing():
            results = _with_backward(derivative)
        if not keep_graph:
            for call in self.calls:
                call.free_graph()
        num = len(self.parameters)
        # The sum is written to the first replica's gradients, which its backward may have saved.
        first = [None if gradient is None else gradient.clone() for gradient in results[0][:num]]
        sums = add_up([first, *(each[:num] for each in results[1:])], self.calls[0].device)
        return [*sums, *(gradient for each in results for gradient in each[num:])]


def add_up(of_replicas: Sequence[Gradients], home: torch.device) -> Gradients:
    """Sum each parameter's gradients in the order of the replicas, for reproducible bits.

    The sums are on the device ``home``. They may be the first replica's tensors, written in place;
    other replicas' tensors are neither written to nor returned.
    """
    first, *others = of_replicas
    total = [None if gradient is None else move(gradient, home) for gradient in first]
    for gradients in others:
        sums: list[torch.Tensor] = []
        parts: list[torch.Tensor] = []
        for index, gradient in enumerate(gradients):
            if gradient is None:
                continue
            # Moved one by one, so that copies of one replica's gradients exist at a time.
            so_far, gradient = total[index], move(gradient, home)
            if so_far is None:
                total[index] = gradient.clone()
            elif so_far.layout is gradient.layout is torch.strided:
                sums.append(so_far)
                parts.append(gradient)
            elif so_far.is_sparse and not gradient.is_sparse:  # torch adds sparse to dense only
                total[index] = gradient + so_far
            else:
                total[index] = so_far + gradient
        if sums:
            _foreach_add_(sums, parts)
    return total


def _with_backward(call: _Call) -> list[Any]:
    """Return the results of each replica, as outputs of the Function of all replicas."""
    tensors: Sequence[torch.Tensor]
    if torch.is_grad_enabled():
        tensors = _Replicas.apply(call, *call.parameters, *call.inputs)  # type: ignore[no-untyped-call]
    else:
        tensors = call.forward()
    mine = iter(tensors)

    def put_in(inner: torch.Tensor) -> torch.Tensor:
        outer = next(mine)
        if is_one(inner):
            mark_as_one(outer)
        return outer

    results, call.results = call.results, []
    return [map_tensors(put_in, result) for result in results]


@uncompiled
class _Replicas(torch.autograd.Function):
    """All replicas, as one Function of the parameters and of all replicas' inputs."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch.enable_grad():  # which autograd has switched off
            inner = call.forward()
        outputs = tuple(output.detach() for output in inner)
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*compress(outputs, [not each.requires_grad for each in inner]))
        return outputs

    @staticmethod
    def backward(ctx: Any, *d_outputs: torch.Tensor | None) -> tuple[Any, ...]:
        keep_graph = _get_current_graph_task_keep_graph()
        remember_reached()
        run = ctx.call.derivative if torch.is_grad_enabled() else ctx.call.backward
        with as_backward_of_replicas():
            gradients = run(d_outputs, keep_graph=keep_graph)
        wanted = ctx.needs_input_grad[1:]
        return None, *(g if needs else None for g, needs in zip(gradients, wanted, strict=True))
