"""A replica in a process of its own: what runs there."""

from __future__ import annotations

import contextlib
import gc
import os
import select
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from lockstep.errors import ReplicaLost
from lockstep.nn.reached import as_backward_of_replicas
from lockstep.nn.replicas.channel import Channel
from lockstep.nn.replicas.gradients import LeftGradients
from lockstep.nn.replicas.group import Replica, as_replica, set_caller
from lockstep.nn.replicas.messages import (
    Call,
    Derived,
    Error,
    Question,
    Request,
    Returned,
    as_error,
    as_exception,
)
from lockstep.nn.replicas.module_copy import LocalReplica, ModuleState, versions_of
from lockstep.nn.replicas.replica_call import ReplicaCall, run_backward


class Worker:
    """A replica, as it is in its own process; its public methods are the caller's to request.

    Args:
        channel: To the caller.
        index: The number of the replica.
        devices: Those of all replicas.
    """

    def __init__(self, channel: Channel, index: int, devices: Sequence[torch.device]) -> None:
        self._channel = channel
        self._index = index
        self._home, self._device = devices[0], devices[index]
        self._module = nn.Module()
        self._replica = LocalReplica(self._module, self._device, owns_buffers=True)
        # The module's parameters, which share the memory of the caller's or are copies of them.
        self._parameters: list[torch.Tensor] = []
        self._originals: Sequence[torch.Tensor] = []
        self._buffers: Sequence[torch.Tensor] = []
        self._gradients = LeftGradients([], torch.empty(0, dtype=torch.uint8))
        self._calls: dict[int, ReplicaCall] = {}
        # Replicas in threads of this process may ask at the same time.
        self._asking = threading.Lock()
        set_caller(self._ask)

    def serve(self) -> None:
        """Answer until the caller is gone."""
        while True:
            try:
                request: Request = self._channel.receive([*self._parameters, *self._buffers])
            except (EOFError, OSError):
                return
            except Exception as error:  # unpickling may raise anything
                answer: object = as_error(error)
            else:
                try:
                    answer = getattr(self, request.method)(*request.arguments)
                except Exception as error:
                    answer = as_error(error)
                del request
            try:
                self._channel.send(answer)
            except OSError:
                return
            except Exception as error:  # pickling may raise anything
                text = f"What the module has returned can't be sent to the caller: {error}."
                self._channel.send(as_error(TypeError(text)))
            del answer

    def _ask(self, function: Callable[..., object], arguments: tuple[object, ...]) -> Any:
        with self._asking:
            self._channel.send(Question(function, arguments))
            answer = self._channel.receive()
        if isinstance(answer, Error):
            raise as_exception(answer)
        return answer

    def take_tensors(
        self,
        parameters: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        flags: Sequence[torch.Tensor],
        are_parameters: Sequence[bool],
        buffers: Sequence[torch.Tensor],
    ) -> None:
        """Take the tensors of the module that comes next.

        Args:
            parameters: Its parameters: the caller's memory.
            gradients: Memory for the gradient of each.
            flags: Memory for a byte for each, in one tensor.
            are_parameters: Which of them are of class Parameter.
            buffers: The values of the buffers.
        """
        self._calls.clear()
        self._originals = parameters
        self._gradients = LeftGradients(gradients, *flags)
        copies = [original.detach().to(self._device) for original in self._originals]
        self._parameters = [
            nn.Parameter(own, requires_grad=False) if is_parameter else own
            for own, is_parameter in zip(copies, are_parameters, strict=True)
        ]
        self._buffers = [buffer.to(self._device) for buffer in buffers]

    def take_module(self, module: nn.Module) -> None:
        """Take the module, which refers to the tensors that have come before."""
        self._module = module
        self._replica = LocalReplica(self._module, self._device, owns_buffers=True)

    def call(self, call: Call) -> Returned:
        """Call a method of the replica."""
        for number in call.dropped:
            self._calls.pop(number, None)
        state = self._updated(call)
        self._replica.update(state)
        for index, leaf in enumerate(self._replica.leaves):
            if leaf.requires_grad:
                self._gradients.take_from(index, leaf)
        torch.set_default_dtype(call.default_dtype)
        method = getattr(self._replica.module, call.method)
        own = ReplicaCall(
            self._device, self._replica.leaves, method, call.arguments, owns_inputs=True
        )
        replica = Replica(self._index, call.num_called, call.num_around, True, None)
        with call.modes.entered(), as_replica(replica):
            own.forward()
        if call.modes.grad:
            self._calls[call.number] = own
        now = versions_of(state.buffers, state.parts)
        changed = [i for i, version in enumerate(state.versions) if version != now[i]]
        return Returned(own.take_results()[0], changed)

    def _updated(self, call: Call) -> ModuleState:
        """Bring the module to the state of the caller's."""
        for part, training in zip(self._module.modules(), call.training, strict=True):
            if part.training is not training:  # to look is much faster than to set
                part.training = training
        for parameter, trained in zip(self._parameters, call.trained, strict=True):
            parameter.requires_grad_(trained)
        with torch.no_grad():
            for index in call.parameters:
                self._parameters[index].copy_(self._originals[index])
        buffers = ModuleState.of(self._module).buffers
        for index, value in call.buffers.items():
            buffers[index].data = value.to(self._device)
        return ModuleState.of(self._module)

    def buffers(self, indices: Sequence[int]) -> list[torch.Tensor]:
        """The buffers as the last call has left them."""
        buffers = ModuleState.of(self._module).buffers
        return [buffers[index] for index in indices]

    def backward(
        self, number: int, d_outputs: Sequence[torch.Tensor | None], keep_graph: bool
    ) -> Derived:
        """Run the backward of a call."""
        call = self._calls.get(number)
        if call is None:
            raise ReplicaLost(
                "The module has changed since this call, other than in its values, and its graph "
                "is gone. Run the backward before, or use workers='threads'."
            )
        ends = call.start_backward(list(d_outputs), keep_graph=keep_graph)
        try:
            self._gradients.is_taking = True
            with as_backward_of_replicas():
                run_backward(ends, keep_graph)
        finally:
            self._gradients.is_taking = False
            left, of_inputs = call.take_gradients()
            in_place = self._gradients.taken()
        others = {i: g.to(self._home) for i, g in enumerate(left) if g is not None}
        if not keep_graph:
            call.free_graph()
        return Derived(in_place, others, of_inputs)


def _end_with(lifeline: socket.socket, caller: int) -> None:
    """Exit when the caller does, even in mid-task."""
    poll = select.poll()
    poll.register(lifeline, select.POLLIN)
    # A child that the caller has forked may hold the other end.
    while os.getppid() == caller and not poll.poll(1000):
        pass
    os._exit(0)


def main(arguments: list[str]) -> None:
    """Be the replica that the caller has started.

    Args:
        arguments: The descriptors of the channel and the lifeline, the number of the replica, its
            number of intra-op threads, its random seed, and the devices of all replicas.
    """
    line, lifeline, index, num_threads, seed = map(int, arguments[:5])
    devices = [torch.device(name) for name in arguments[5:]]
    device = devices[index]
    if hasattr(os, "SCHED_BATCH"):
        # Otherwise the first that is sent a message takes the caller's core before the others have
        # theirs.
        with contextlib.suppress(OSError):  # where it isn't allowed
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    torch.set_num_threads(num_threads)
    torch.manual_seed(seed)
    watched = (socket.socket(fileno=lifeline), os.getppid())
    threading.Thread(target=_end_with, args=watched, daemon=True).start()
    if device.type not in ("cpu", "meta"):
        torch.accelerator.set_device_index(device)
    channel = Channel(socket.socket(fileno=line), [devices[0], device])
    Worker(channel, index, devices).serve()
    # The caller counts who has memory of an accelerator: nothing is to be held at the end.
    set_caller(None)
    gc.collect()
