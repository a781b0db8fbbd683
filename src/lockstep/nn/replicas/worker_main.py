"""The program of a replica's process."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from lockstep.errors import ReplicaLost
from lockstep.nn.autograd import as_backward_of_replicas
from lockstep.nn.replicas.channel import Channel, Error, Request
from lockstep.nn.replicas.devices import move
from lockstep.nn.replicas.group import Replica, as_replica, set_caller
from lockstep.nn.replicas.local_replica import (
    Arguments,
    Gradients,
    LocalReplica,
    ReplicaCall,
    run_backward,
)
from lockstep.nn.replicas.module_copy import ModuleState
from lockstep.nn.replicas.worker_threads import Modes

# How long a process may run after its connection was closed; an idle one exits at once.
GRACE_SECONDS = 0.5
POLL_SECONDS = 0.005


class Call(NamedTuple):
    """A call of a method of the module, with changes of the caller's modes and module."""

    number: int  # to which its backward refers
    replica: Replica  # without sums, which are the caller's
    method: str
    arguments: Arguments
    modes: Modes
    training: list[bool]  # of each part of the module
    trained: list[bool]  # for each parameter whether it requires a gradient
    parameters: list[int]  # indices of those that have changed, if the process has copies
    buffers: dict[int, torch.Tensor]  # those that have changed, by index
    live: set[int]  # the numbers of earlier calls that may have a further backward
    returns_buffers: bool  # whether to return the floating-point buffers, too


class Worker:
    """A replica in its own process, on ``device``. The caller requests its public methods.

    It has a copy of the module, whose parameters are the caller's tensors on ``home``, and a
    replica of that copy.
    """

    def __init__(self, channel: Channel, home: torch.device, device: torch.device) -> None:
        self._channel = channel
        self._home, self._device = home, device
        # Threads of this process may request something of the caller at the same time.
        self._asking = threading.Lock()
        set_caller(self._ask)

    def serve(self) -> None:
        """Answer requests until an answer can't be sent, as the caller is gone."""
        with contextlib.suppress(OSError):
            while True:
                self._channel.answer(self._run_next)

    def _run_next(self) -> object:
        request: Request = self._channel.receive()
        return getattr(self, request.function)(*request.arguments)

    def _ask(self, function: Callable[..., object], arguments: tuple[object, ...]) -> Any:
        with self._asking:
            self._channel.send(Request(function, arguments))
            answer = self._channel.receive()
        if isinstance(answer, Error):
            raise answer.exception()
        return answer

    def take(self, module: nn.Module, gradients: Sequence[torch.Tensor]) -> None:
        """Replace the module; ``gradients`` is the caller's memory for those of parameters."""
        self._calls: dict[int, ReplicaCall] = {}
        self._gradients = gradients
        # During a backward of the caller, and not one that the module itself starts: the indices of
        # the gradients that are in the caller's memory.
        self._taken: set[int] | None = None
        self._leaves: dict[int, torch.Tensor] = {}
        self._module = module
        self._replica = LocalReplica(module, self._device, owns_buffers=False)

    def call(self, call: Call) -> tuple[Any, Gradients]:
        """Return a method's results, and floating-point buffers if ``returns_buffers``."""
        self._calls = {number: own for number, own in self._calls.items() if number in call.live}
        for part, training in zip(self._module.modules(), call.training, strict=True):
            if part.training is not training:  # a read is much faster than a write
                part.training = training
        state = ModuleState.of(self._module)
        for parameter, trained in zip(state.parameters, call.trained, strict=True):
            parameter.requires_grad_(trained)
        torch.autograd.graph.increment_version([state.parameters[i] for i in call.parameters])
        for index, value in call.buffers.items():
            state.buffers[index].data = value
        self._replica.update(ModuleState.of(self._module))
        leaves = self._replica.leaves
        for index, leaf in enumerate(leaves):
            if leaf.requires_grad and self._leaves.get(index) is not leaf:
                self._leaves[index] = leaf
                leaf.register_post_accumulate_grad_hook(partial(self._take_gradient, index))
        torch.set_default_dtype(call.modes.dtype)
        method = getattr(self._replica.module, call.method)
        own = ReplicaCall(self._device, leaves, method, call.arguments)
        with call.modes.entered(), as_replica(call.replica):
            own.forward()
        if call.modes.grad:
            self._calls[call.number] = own
        results, own.results = own.results, None
        buffers = self._replica.buffers if call.returns_buffers else ()
        return results, [buffer if buffer.is_floating_point() else None for buffer in buffers]

    def backward(
        self, number: int, d_outputs: Gradients, keep_graph: bool
    ) -> tuple[set[int], dict[int, torch.Tensor], Gradients]:
        """Run the backward of a call.

        Returns:
            The indices of gradients of parameters that are in the caller's memory; by index, those
            that aren't, as they are sparse; and the gradients of the inputs.
        """
        call = self._calls.get(number)
        if call is None:
            raise ReplicaLost(
                "The module has changed since this call, other than in its values, and its graph "
                "is gone. Run the backward before, or use workers='threads'."
            )
        ends = call.start_backward(d_outputs, keep_graph=keep_graph)
        self._taken = taken = set[int]()
        try:
            with as_backward_of_replicas():
                run_backward(ends, keep_graph)
        finally:
            self._taken = None
            left, of_inputs = call.take_gradients()
        others = {i: own.to(self._home) for i, own in enumerate(left) if own is not None}
        if not keep_graph:
            call.free_graph()
        return taken, others, of_inputs

    def _take_gradient(self, index: int, leaf: torch.Tensor) -> None:
        """Move a gradient to the caller's memory, while the CPU's cache has it."""
        gradient = leaf.grad
        if self._taken is None or gradient is None:
            return
        if index in self._taken:  # reentrant checkpoints accumulate a gradient in several parts
            self._gradients[index].add_(move(gradient, self._home))
        elif gradient.layout is torch.strided:
            self._gradients[index].copy_(gradient)
            self._taken.add(index)
        else:
            return
        leaf.grad = None


def _fork_processes(caller: int, numbers: Sequence[int]) -> int:
    """Fork a process for each descriptor but the first, and return its index in each of them.

    This process, their parent, exits when the caller is ready to adopt them.
    """
    parent, pids, connection = os.getpid(), [], socket.socket(fileno=numbers[0])
    for index, number in enumerate(numbers[1:] if os.getppid() == caller else (), start=1):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads, which are OpenBLAS's
            pid = os.fork()
        if not pid:
            connection.detach()
            for other in {*numbers} - {number}:
                os.close(other)
            os.setsid()
            while os.getppid() == parent:  # until the caller is
                time.sleep(POLL_SECONDS)
            return index
        pids.append(pid)
    with contextlib.suppress(OSError):  # the caller has ended
        connection.sendall(json.dumps(pids).encode())
        _wait_for_end(connection, caller)
    os._exit(0)


def _wait_for_end(connection: socket.socket, caller: int) -> None:
    """Wait until the caller has shut the connection down, or has ended."""
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    # The caller's end doesn't hang up if a process that the caller has forked holds it open.
    while not poll.poll(1000) and os.getppid() == caller:
        pass


def _end_with(connection: socket.socket, caller: int) -> None:
    """Exit soon after the caller has closed the connection or ended, even during a call."""
    _wait_for_end(connection, caller)
    time.sleep(GRACE_SECONDS)
    os._exit(0)


def main(
    num_threads: int, caller: int, numbers: Sequence[int], seed: int, devices: Sequence[str]
) -> None:
    """Fork the replicas' processes, and serve requests in each of them.

    Args:
        num_threads: The number of intra-op threads of each process.
        caller: The process id of the caller.
        numbers: Descriptors of sockets to the caller: one for this process, then one per replica.
        seed: The random seed of the caller.
        devices: The devices of the caller and of the replicas.
    """
    index = _fork_processes(caller, numbers)
    connection = socket.socket(fileno=numbers[index])
    home, device = torch.device(devices[0]), torch.device(devices[index])
    # Otherwise the first process to receive a message preempts the caller, which has not yet sent
    # the others theirs.
    with contextlib.suppress(OSError):  # where the scheduler's policy may not be changed
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    torch.set_num_threads(num_threads)
    torch.manual_seed((seed + index) % 2**63)
    # numpy 1 makes its global generator when it is imported. Python seeds its own after a fork.
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed()
    threading.Thread(target=_end_with, args=(connection, caller), daemon=True).start()
    if device.type not in ("cpu", "meta"):
        torch.accelerator.set_device_index(device)
    Worker(Channel(connection, [home, device], is_caller=False), home, device).serve()
    # torch counts in the caller who holds its CUDA memory: free all tensors before the exit.
    set_caller(None)
    gc.collect()
