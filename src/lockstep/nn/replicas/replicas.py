"""The replicas of a module, in threads or processes, as one autograd Function.

Autograd runs the backward of all CPU operations of one graph in one thread. So each replica has a
graph of its own, in which its inputs and parameters are leaves. In the caller's graph all replicas
are one Function, whose backward runs the replicas' backwards in parallel and sums their gradients.

Each replica has a thread in this process. For a replica in another process, that thread receives
the results and runs the requests of the process; so sums over replicas are always sums over
threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
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
from lockstep.nn.replicas.local_replica import (
    Arguments,
    Gradients,
    LocalReplica,
    ReplicaCall,
    run_backward,
)
from lockstep.nn.replicas.module_copy import ModuleState, check_home
from lockstep.nn.replicas.nested import map_tensors, tensors_in
from lockstep.nn.replicas.processes import RemoteCall, ReplicaProcesses
from lockstep.nn.replicas.worker_threads import WorkerThreads, nothing, raise_first
from lockstep.torch_private import (
    DelayedError,
    _foreach_add_,
    _get_current_graph_task_keep_graph,
)

Task = Callable[[], object]

_NOT_TWICE = (
    "A gradient that came out of replicas in processes is to be differentiated again, which those "
    "in threads alone can: lockstep.DataParallel(..., workers='threads')."
)


class Replicas:
    """A module's replicas, the first in the caller's thread, the others in threads or processes.

    The module is on the first of ``devices``. The other replicas are threads if ``timeout`` is
    None, else processes, with that timeout in seconds.
    """

    def __init__(
        self, devices: Sequence[torch.device], *, averages_buffers: bool, timeout: float | None
    ) -> None:
        self._devices = devices
        self._averages_buffers = averages_buffers
        self._timeout = timeout
        self._local: list[LocalReplica] = []
        self._processes: ReplicaProcesses | None = None
        self._workers = WorkerThreads(len(devices))

    def call(self, module: nn.Module, method: str, arguments: Sequence[Arguments]) -> list[Any]:
        """Call ``method`` of one replica for each of ``arguments``; return their results."""
        with self._workers.lock, ExitStack() as entered:
            state = ModuleState.of(module)
            check_home([*state.parameters, *state.buffers], self._devices[0])
            refuse_forward_mode(state.parameters, state.buffers, arguments)
            if self._timeout is not None:
                if self._processes is None or not self._processes.is_alive:
                    self._processes = ReplicaProcesses(self._devices, self._timeout)
                entered.enter_context(self._processes.in_use())
                self._processes.update(module, state)
            entered.enter_context(self._workers.sharing())
            remote: list[RemoteCall] = []
            if self._processes is not None:
                remote = self._processes.call(state, method, arguments[1:], self._averages_buffers)
            local = self._update_local(module, state, len(arguments))
            calls = [
                ReplicaCall(replica.device, replica.leaves, getattr(replica.module, method), own)
                for replica, own in zip(local, arguments, strict=False)
            ]
            call = _Call([*calls, *remote], state.parameters, self._workers, self._processes)
            results = _with_backward(call)
            if self._averages_buffers:
                copies = zip(*(a.buffers for a in local), *(a.buffers for a in remote), strict=True)
                for buffer, values in zip(state.buffers, copies, strict=True):
                    _write_mean(buffer, values)
            return results

    def _update_local(
        self, module: nn.Module, state: ModuleState, count: int
    ) -> list[LocalReplica]:
        """Update the first ``count`` of the replicas in this process to ``state``; return them."""
        if not self._local or self._local[0].parts != state.parts:
            devices = self._devices[:1] if self._processes is not None else self._devices
            self._local = [
                LocalReplica(module, device, owns_buffers=not self._averages_buffers and not index)
                for index, device in enumerate(devices)
            ]
        local = self._local[:count]
        for replica in local:
            replica.update(state)
        return local


def _write_mean(buffer: torch.Tensor, values: Sequence[torch.Tensor | None]) -> None:
    """Write the mean of the replicas' ``values`` to a floating-point buffer, to others the first.

    A buffer that no replica has changed is not written to, and so keeps its bits.
    """
    there = [value.to(buffer.device) for value in values if value is not None]
    # Compare values, as some writes don't increment the tensor's version.
    if not all(torch.equal(value, buffer) for value in there):
        with torch.no_grad():
            buffer.copy_(torch.stack(there).mean(0) if buffer.is_floating_point() else there[0])


@dataclass(eq=False, repr=False)
class _Call:
    """One call of all replicas, as a function from parameters and inputs to outputs."""

    calls: Sequence[ReplicaCall | RemoteCall]
    parameters: list[torch.Tensor]
    workers: WorkerThreads
    processes: ReplicaProcesses | None = None  # of all replicas but the first, if they have any
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
            self._run(here, lambda: [call.forward() for call in elsewhere])  # see backward()
        else:
            tasks = [self._on_devices(call, call.forward) for call in self.calls]
            self._run(as_replicas(tasks, in_processes=self.processes is not None))
        outputs: list[torch.Tensor] = []
        for call in self.calls:
            tensors = tensors_in(call.results)
            self.results.append(call.results)
            self.num_outputs.append(len(tensors))
            outputs += tensors
            call.results = None
        return outputs

    def _on_devices(self, call: ReplicaCall | RemoteCall, task: Task) -> Task:
        """Return ``task`` on the call's device; processes send tensors of all devices."""
        calls = self.calls if isinstance(call, RemoteCall) else [call]
        for device in {own.device for own in calls}:
            task = on_device(device, task)
        return task

    def _run(self, tasks: Sequence[Task], meanwhile: Task = nothing) -> None:
        if self.processes is None:
            futures = self.workers.run(tasks, meanwhile)
        else:
            futures = self.workers.run(tasks, meanwhile, interrupted=self.processes.kill)
            self.processes.check(futures[0].exception())
        raise_first([own.exception() for own in futures], [call.device for call in self.calls])

    def backward(self, d_outputs: Sequence[torch.Tensor | None], *, keep_graph: bool) -> Gradients:
        """Run all backwards; return the gradients of ``parameters`` and ``inputs``."""
        keeps = keep_graph or self._shares_graph
        with self.workers.lock, ExitStack() as entered:
            entered.enter_context(self.workers.sharing())
            if self.processes is not None:
                self.processes.check_alive()
                entered.enter_context(self.processes.in_use())
            try:
                tasks: list[Task] = []
                elsewhere: list[tuple[torch.Tensor, torch.Tensor]] = []
                for call, own in zip(self.calls, self._split(d_outputs), strict=True):
                    ends = call.start_backward(own, keep_graph=keep_graph)
                    if isinstance(call, RemoteCall):
                        tasks.append(self._on_devices(call, call.receive_gradients))
                    elif call.device.type == "cpu" or self.processes is not None:
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
            # Under the lock: the next backward writes to the same shared memory.
            sums = add_up([own for own, _ in taken], self.calls[0].device)
        return [*sums, *(gradient for _, of_inputs in taken for gradient in of_inputs)]

    def _split(self, d_outputs: Sequence[torch.Tensor | None]) -> list[Gradients]:
        """Split the gradients of all outputs by replica."""
        given = iter(d_outputs)
        return [list(islice(given, count)) for count in self.num_outputs]

    def derivative(
        self, d_outputs: Sequence[torch.Tensor | None], *, keep_graph: bool
    ) -> Gradients:
        """Run :meth:`backward` with ``create_graph``, so that the gradients have a backward."""
        if self.processes is not None:
            gradients = self.backward(d_outputs, keep_graph=keep_graph)
            # With the sources as inputs, autograd reaches the node that raises. Shown by
            # test_a_second_derivative_of_processes_says_what_can_be_used_instead.
            tensors = [*gradients, *self.parameters, *self.inputs, *d_outputs]
            raising = DelayedError(_NOT_TWICE, len(tensors))
            return [*raising(*tensors)[: len(gradients)]]
        calls = [
            call.derivative(own)
            for call, own in zip(self.calls, self._split(d_outputs), strict=True)
            if isinstance(call, ReplicaCall)
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
        sums = add_up([first, *(own[:num] for own in results[1:])], self.calls[0].device)
        return [*sums, *(gradient for own in results for gradient in own[num:])]


def add_up(of_replicas: Sequence[Gradients], home: torch.device) -> Gradients:
    """Sum each parameter's gradients in the order of the replicas, for reproducible bits.

    The sums are on the device ``home``. They may be the first replica's tensors, written in place;
    other replicas' tensors are neither written to nor returned.
    """
    first, *others = of_replicas
    total = [None if own is None else move(own, home) for own in first]
    for gradients in others:
        sums: list[torch.Tensor] = []
        parts: list[torch.Tensor] = []
        for index, own in enumerate(gradients):
            if own is None:
                continue
            # Moved one by one, so that copies of one replica's gradients exist at a time.
            so_far, gradient = total[index], move(own, home)
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
        ctx.mark_non_differentiable(*compress(outputs, [not own.requires_grad for own in inner]))
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
