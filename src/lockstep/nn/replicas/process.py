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
from lockstep.nn.replicas.enclosing import as_backward_of_replicas
from lockstep.nn.replicas.gradients import LeftGradients
from lockstep.nn.replicas.meeting import Finish, Meeting, caller_is_elsewhere, is_one
from lockstep.nn.replicas.messages import (
    Ask,
    Backward,
    Buffers,
    Call,
    Derived,
    Error,
    Module,
    Returned,
    Sum,
    Tensors,
    as_error,
    as_exception,
)
from lockstep.nn.replicas.part import Part, run_backward
from lockstep.nn.replicas.tables import leaf_as_table
from lockstep.nn.replicas.tensors import map_tensors
from lockstep.nn.replicas.twins import own_tensors, versions_of
from lockstep.nn.replicas.wire import Wire


class ReplicaProcess:
    """A replica, as it is in its own process.

    Args:
        wire: To the caller.
        replica: Which one it is.
        devices: Those of all.
    """

    def __init__(self, wire: Wire, replica: int, devices: Sequence[torch.device]) -> None:
        self._wire = wire
        self._meeting = _MeetingElsewhere(self._ask, len(devices))
        self._replica = replica
        self._home, self._device = devices[0], devices[replica]
        self._module = nn.Module()
        self._parameters: list[torch.Tensor] = []
        self._originals: Sequence[torch.Tensor] = []
        self._gradients = LeftGradients([], torch.empty(0, dtype=torch.uint8))
        self._buffers: Sequence[torch.Tensor] = []
        self._calls: dict[int, Part] = {}
        # Replicas in threads of this process may ask at the same time.
        self._asking = threading.Lock()
        caller_is_elsewhere(lambda function, arguments: self._ask(Ask(function, arguments)))

    def serve(self) -> None:
        """Answer until the caller is gone."""
        answers: dict[type, Callable[[Any], object]] = {
            Tensors: self._take_tensors,
            Module: self._take_module,
            Call: self._call,
            Backward: self._backward,
            Buffers: self._take_out_buffers,
        }
        while True:
            try:
                message = self._wire.receive([*self._parameters, *self._buffers])
            except (EOFError, OSError):
                return
            except Exception as error:  # what is unpickled raises what it likes
                answer: object = as_error(error)
            else:
                try:
                    answer = answers[type(message)](message)
                except Exception as error:
                    answer = as_error(error)
                del message
            try:
                self._wire.send(answer)
            except OSError:
                return
            except Exception as error:  # what is pickled raises what it likes
                text = f"What the module has returned can't be sent to the caller: {error}."
                self._wire.send(as_error(TypeError(text)))
            del answer

    def _ask(self, question: Sum | Ask) -> Any:
        """What the caller answers."""
        with self._asking:
            self._wire.send(question)
            answer = self._wire.receive()
        if isinstance(answer, Error):
            raise as_exception(answer)
        return answer

    def _take_tensors(self, tensors: Tensors) -> None:
        self._calls.clear()
        self._originals = tensors.parameters
        self._gradients = LeftGradients(tensors.gradients, *tensors.flags)
        self._parameters = [original.detach().to(self._device) for original in self._originals]
        for index, (is_parameter, is_table) in enumerate(
            zip(tensors.are_parameters, tensors.are_tables, strict=True)
        ):
            own = self._parameters[index]
            if is_table:
                own = leaf_as_table(own)
            elif is_parameter:
                own = nn.Parameter(own, requires_grad=False)
            self._parameters[index] = own
        self._buffers = [buffer.to(self._device) for buffer in tensors.buffers]

    def _take_module(self, message: Module) -> None:
        self._module = message.module

    def _call(self, call: Call) -> Returned:
        for number in call.dropped:
            self._calls.pop(number, None)
        parts = list(self._module.modules())
        for own, training in zip(parts, call.training, strict=True):
            if own.training is not training:  # to look is much faster than to set
                own.training = training
        for index, (parameter, trained) in enumerate(
            zip(self._parameters, call.trained, strict=True)
        ):
            if parameter.requires_grad is not trained:
                parameter.requires_grad_(trained)
                if trained:
                    self._gradients.take_from(index, parameter)
        self._take_values(call.parameters)
        buffers = self._own_buffers(parts)
        for index, value in call.buffers.items():
            buffers[index].data = value.to(self._device)
        before = versions_of(buffers, parts)
        torch.set_default_dtype(call.default_dtype)
        flags = iter(call.require_grad)
        arguments = map_tensors(lambda t: t.requires_grad_(next(flags)), call.arguments)
        self._meeting.count, self._meeting.num_around = call.num_parts, call.num_around
        was = [(own, own.__dict__.copy(), own._buffers.copy()) for own in parts]
        method = getattr(self._module, call.method)
        part = Part(self._device, self._parameters, method, arguments, owns_inputs=True)
        try:
            with call.modes.entered(), self._meeting.attended_by(self._replica):
                part.forward()
        finally:
            for own, attributes, its_buffers in was:  # each call begins with the caller's
                kept = {n: own.__dict__[n] for n in getattr(own, "_own_in_twins", ())}
                own.__dict__.clear()
                own.__dict__.update(attributes | kept)
                own._buffers.clear()
                own._buffers.update(its_buffers)
        if call.modes.grad:
            self._calls[call.number] = part
        results, part.results = part.results, None
        return Returned(
            results,
            [output.requires_grad for output in part.outputs],
            [is_one(output) for output in part.outputs],
            [i for i, now in enumerate(versions_of(buffers, parts)) if now != before[i]],
        )

    def _take_values(self, changed: Sequence[int]) -> None:
        """Have the parameters' values, of which the caller has changed some."""
        if self._device == self._home:
            # The module may have given one other memory, as RNNs do to have theirs in one piece.
            for own, original in zip(self._parameters, self._originals, strict=True):
                if own.data_ptr() != original.data_ptr():
                    own.data = original
        with torch.no_grad():
            for index in changed:
                self._parameters[index].copy_(self._originals[index])

    def _own_buffers(self, parts: list[nn.Module]) -> list[torch.Tensor]:
        """All but those that are trained, which the caller takes for parameters."""
        trained = {id(parameter) for parameter in self._parameters}
        return [b for b in own_tensors(parts, "_buffers") if id(b) not in trained]

    def _take_out_buffers(self, wanted: Buffers) -> list[torch.Tensor]:
        buffers = self._own_buffers(list(self._module.modules()))
        return [buffers[index] for index in wanted.indices]

    def _backward(self, backward: Backward) -> Derived:
        part = self._calls.get(backward.number)
        if part is None:
            raise ReplicaLost(
                "The module has changed since this call, other than in its values, and its graph "
                "is gone. Run the backward before, or use workers='threads'."
            )
        try:
            self._gradients.is_taking = True
            with as_backward_of_replicas():
                run_backward(part.ends(backward.d_outputs), backward.keep_graph)
        finally:
            self._gradients.is_taking = False
            left, of_inputs = part.take_gradients()
            in_place = self._gradients.taken()
        others = {i: g.to(self._home) for i, g in enumerate(left) if g is not None}
        if not backward.keep_graph:
            part.forget()
        return Derived(in_place, others, of_inputs)


class _MeetingElsewhere(Meeting):
    """A meeting that the caller holds, as the replicas are in different processes."""

    def __init__(self, ask: Callable[[Sum], Any], count: int) -> None:
        super().__init__(count)
        self._ask = ask

    def add_up(self, replica: int, own: torch.Tensor, finish: Finish | None = None) -> torch.Tensor:
        total: torch.Tensor = self._ask(Sum(own, finish))
        return total.to(own.device)

    def leave(self) -> None:
        """The caller sees it itself."""


def _end_with(lifeline: socket.socket, caller: int) -> None:
    """Be no longer there than the caller, also in the middle of something."""
    poll = select.poll()
    poll.register(lifeline, select.POLLIN)
    # A child that the caller has forked may hold the other end.
    while os.getppid() == caller and not poll.poll(1000):
        pass
    os._exit(0)


def main(arguments: list[str]) -> None:
    """Be the replica that the caller has started.

    Args:
        arguments: The descriptors of the line and the lifeline, which replica it is, how many
            threads it computes with, its random seed, and the devices of all replicas.
    """
    line, lifeline, replica, num_threads, seed = map(int, arguments[:5])
    devices = [torch.device(name) for name in arguments[5:]]
    device = devices[replica]
    if hasattr(os, "SCHED_BATCH"):
        # Otherwise the first that is told something takes the caller's core before it has told the
        # others.
        with contextlib.suppress(OSError):  # where it isn't allowed
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    torch.set_num_threads(num_threads)
    torch.manual_seed(seed)
    watched = (socket.socket(fileno=lifeline), os.getppid())
    threading.Thread(target=_end_with, args=watched, daemon=True).start()
    if device.type not in ("cpu", "meta"):
        torch.accelerator.set_device_index(device)
    wire = Wire(socket.socket(fileno=line), [devices[0], device])
    ReplicaProcess(wire, replica, devices).serve()
    # The caller counts who has memory of an accelerator: nothing is to be held at the end.
    caller_is_elsewhere(None)
    gc.collect()
