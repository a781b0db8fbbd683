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
from typing import Any, NamedTuple

import torch
from torch import nn

from lockstep.errors import ReplicaLost
from lockstep.nn.autograd import as_backward_of_replicas
from lockstep.nn.replicas.channel import Channel, Error, Request
from lockstep.nn.replicas.gradients import Gradients, LeftGradients
from lockstep.nn.replicas.group import Replica, as_replica, set_caller
from lockstep.nn.replicas.local_replica import Arguments, LocalReplica, ReplicaCall, run_backward
from lockstep.nn.replicas.module_copy import ModuleState
from lockstep.nn.replicas.worker_threads import Modes

# How long a process that is hung up on may take to end: an idle one takes less.
GRACE_SECONDS = 0.5
POLL_SECONDS = 0.005


class Call(NamedTuple):
    """A call of a method of the module, with the state of the caller and of the caller's module."""

    number: int  # by which its backward refers to it
    replica: Replica  # its sums are the caller's
    method: str
    arguments: Arguments
    modes: Modes
    training: list[bool]  # of each part of the module
    trained: list[bool]  # for each parameter whether it requires a gradient
    parameters: list[int]  # the indices of those that have changed, if the process has copies
    buffers: dict[int, torch.Tensor]  # those that have changed, by index
    dropped: list[int]  # the numbers of calls of which no backward will come
    returns_buffers: bool  # whether to return the buffers of floating point, too


class Worker:
    """A replica in its own process, on ``device``; its public methods are the caller's to request.

    It has a copy of the module, with the caller's parameters on ``home``, and a replica of that.
    """

    def __init__(self, channel: Channel, home: torch.device, device: torch.device) -> None:
        self._channel = channel
        self._home, self._device = home, device
        # Replicas in threads of this process may ask at the same time.
        self._asking = threading.Lock()
        set_caller(self._ask)

    def serve(self) -> None:
        """Answer requests until an answer, be it an error, can't be sent: the caller is gone."""
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
        """Take the module; ``gradients`` is the caller's memory for :class:`LeftGradients`."""
        self._calls: dict[int, ReplicaCall] = {}
        self._gradients = LeftGradients(gradients)
        self._module = module
        self._replica = LocalReplica(module, self._device, owns_buffers=False)

    def call(self, call: Call) -> tuple[Any, Gradients]:
        """Return a method's results, and the buffers of floating point if they are asked for."""
        for number in call.dropped:
            self._calls.pop(number, None)
        for part, training in zip(self._module.modules(), call.training, strict=True):
            if part.training is not training:  # to look is much faster than to set
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
            self._gradients.take_from(index, leaf)
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
    ) -> tuple[bytes, dict[int, torch.Tensor], Gradients]:
        """Run the backward of a call, and return which parameters' gradients were left.

        Returned are also, by index, gradients that were not left, as they are sparse, and further
        parts of those that were; and the gradients of the inputs.
        """
        call = self._calls.get(number)
        if call is None:
            raise ReplicaLost(
                "The module has changed since this call, other than in its values, and its graph "
                "is gone. Run the backward before, or use workers='threads'."
            )
        ends = call.start_backward(d_outputs, keep_graph=keep_graph)
        try:
            self._gradients.is_taking = True
            with as_backward_of_replicas():
                run_backward(ends, keep_graph)
        finally:
            self._gradients.is_taking = False
            left, of_inputs = call.take_gradients()
            in_place = self._gradients.taken()
        others = {i: own.to(self._home) for i, own in enumerate(left) if own is not None}
        if not keep_graph:
            call.free_graph()
        return in_place, others, of_inputs


def _fork_processes(connection: socket.socket, caller: int, numbers: Sequence[int]) -> int:
    """Fork a process for each descriptor; return its index in it, and end the parent.

    The parent ends when the caller, which adopts its children then, says so.
    """
    parent, pids = os.getpid(), []
    for index, number in enumerate(numbers if os.getppid() == caller else ()):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads, which are OpenBLAS's
            pid = os.fork()
        if not pid:
            for other in {*numbers, connection.detach()} - {number}:
                os.close(other)
            os.setsid()
            while os.getppid() == parent:  # until the caller is
                time.sleep(POLL_SECONDS)
            return index
        pids.append(pid)
    with contextlib.suppress(OSError):  # the caller has ended
        connection.sendall(json.dumps(pids).encode())
        _wait_for(connection, select.POLLIN, caller)
    os._exit(0)


def _wait_for(connection: socket.socket, event: int, caller: int) -> bool:
    """Wait for an event of a connection; return False if the caller has ended instead."""
    poll = select.poll()
    poll.register(connection, event)
    # A child that the caller has forked may hold the other end.
    while not poll.poll(1000):
        if os.getppid() != caller:
            return False
    return True


def _end_with(connection: socket.socket, caller: int) -> None:
    """Exit a moment after the caller has hung up or ended, even in mid-task."""
    _wait_for(connection, select.POLLRDHUP, caller)
    time.sleep(GRACE_SECONDS)
    os._exit(0)


def main(
    num_threads: int, caller: int, numbers: Sequence[int], seats: Sequence[Sequence[Any]]
) -> None:
    """Fork the replicas' processes, and be one of them, with ``num_threads`` intra-op threads.

    ``numbers`` are descriptors of connections to the process ``caller``, first one for all. In
    ``seats`` each process has its random seed, the module's device and its own.
    """
    first, *others = numbers
    index = _fork_processes(socket.socket(fileno=first), caller, others)
    connection, (seed, *devices) = socket.socket(fileno=others[index]), seats[index]
    home, device = map(torch.device, devices)
    if hasattr(os, "SCHED_BATCH"):
        # Otherwise the first that is sent a message takes the caller's core before the others have
        # theirs.
        with contextlib.suppress(OSError):  # where it isn't allowed
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    torch.set_num_threads(num_threads)
    torch.manual_seed(seed)
    # numpy 1 makes its global generator when it is imported. Python seeds its own after a fork.
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed()
    threading.Thread(target=_end_with, args=(connection, caller), daemon=True).start()
    if device.type not in ("cpu", "meta"):
        torch.accelerator.set_device_index(device)
    Worker(Channel(connection, [home, device], is_caller=False), home, device).serve()
    # The caller counts who has memory of an accelerator: nothing is to be held at the end.
    set_caller(None)
    gc.collect()
