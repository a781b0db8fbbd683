"""The processes of a module's replicas, as the caller has them, and what they know."""

from __future__ import annotations

import contextlib
import itertools
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lockstep.errors import ReplicaLost
from lockstep.nn.replicas.gradients import SharedGradients
from lockstep.nn.replicas.known import Known
from lockstep.nn.replicas.meeting import Round, beyond, num_replicas, this_seat
from lockstep.nn.replicas.member import Member, end_members, first_to_speak
from lockstep.nn.replicas.messages import (
    Ask,
    Backward,
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
from lockstep.nn.replicas.modes import Modes
from lockstep.nn.replicas.openmp import alone
from lockstep.nn.replicas.part import Arguments
from lockstep.nn.replicas.shared import share
from lockstep.nn.replicas.tables import tables_in
from lockstep.nn.replicas.tensors import tensors_in
from lockstep.nn.replicas.twins import check_home, trained_and_buffers, version_of, versions_of
from lockstep.nn.replicas.wire import Packed
from lockstep.nn.replicas.workers import Outcome, values_of


class Crew:
    """The processes, and what they know.

    Attributes:
        is_alive: Whether all of them are there.
        pid: Whose they are.
        devices: One for each.
        parameters: Those of the module that they have.
        dropped: For each process calls of which no backward will come; it is told with its next.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.is_alive = True
        self.pid = os.getpid()
        self.devices = devices
        self.parameters: list[torch.Tensor] = []
        self.dropped: list[list[int]] = [[] for _ in devices]
        self._numbers = itertools.count()
        self._known = Known([], [], [])
        self._gradients = SharedGradients([], devices[0], 0)
        # For each process, which version of each parameter and buffer it has.
        self._parameter_versions: list[list[object]] = []
        self._versions: list[list[object]] = []
        self._returned_buffers: list[dict[int, torch.Tensor]] = []
        self._members = [Member(number, devices) for number in range(len(devices))]
        self._end = weakref.finalize(self, end_members, self._members)

    def take(self, module: nn.Module) -> None:
        """Let all have the module, as it is now."""
        parts = list(module.modules())
        parameters, buffers = trained_and_buffers(parts)
        if not self._known.is_still(parts, parameters, buffers):
            check_home([*parameters, *buffers], self.devices[0])
            self._send_module(module, parameters, buffers)
            self._known = Known(parts, parameters, buffers)
        self.parameters = parameters

    def _send_module(
        self, module: nn.Module, parameters: list[torch.Tensor], buffers: list[torch.Tensor]
    ) -> None:
        known = {id(tensor): index for index, tensor in enumerate([*parameters, *buffers])}
        try:
            modules = [Packed(Module(module), known) for _ in self._members]
        except Exception as error:  # what is pickled raises what it likes
            raise TypeError(
                f"{type(module).__name__} can't be sent to other processes: {error}. Use "
                "workers='threads', or leave out what can't be pickled."
            ) from error
        parts = list(module.modules())
        tables = tables_in(parts)
        are_tables = [id(parameter) in tables for parameter in parameters]
        are_parameters = [isinstance(parameter, nn.Parameter) for parameter in parameters]
        shared = share(parameters)
        self._gradients = SharedGradients(parameters, self.devices[0], len(self._members))
        with self._or_end(), contextlib.closing(self._gradients):
            tensors = [
                Packed(Tensors(shared, own, are_parameters, are_tables, buffers))
                for own in map(self._gradients.of, range(len(self._members)))
            ]
            for packed in (tensors, modules):
                values_of(self._answers(packed), self.devices)
        versions = versions_of(buffers, parts)
        self._versions = [list(versions) for _ in self._members]
        versions = [version_of(parameter) for parameter in parameters]
        self._parameter_versions = [list(versions) for _ in self._members]

    def call(
        self, method: str, arguments: Sequence[Arguments], modes: Modes
    ) -> tuple[int, list[Returned]]:
        """Call that method of as many replicas as there are arguments.

        Returns:
            The number of the call, and what each has answered.
        """
        number, dropped = next(self._numbers), [own[:] for own in self.dropped]
        training = [part.training for part in self._known.parts]
        trained = [parameter.requires_grad for parameter in self.parameters]
        try:
            messages = [
                Call(
                    number,
                    method,
                    own,
                    [tensor.requires_grad for tensor in tensors_in(own)],
                    modes,
                    torch.get_default_dtype(),
                    training,
                    trained,
                    self._new_parameters(replica),
                    self._new_buffers(replica),
                    dropped[replica],
                    len(arguments),
                    num_replicas(),
                )
                for replica, own in enumerate(arguments)
            ]
            answers = self.ask(messages)
        except BaseException:
            # Some may have done it: what they have isn't known, and no backward comes.
            self._versions = [[None] * len(self._known.buffers) for _ in self._members]
            self._parameter_versions = [[None] * len(self.parameters) for _ in self._members]
            self.drop(number, len(arguments))
            raise
        for waiting, told in zip(self.dropped, dropped[: len(arguments)], strict=False):
            del waiting[: len(told)]
        self._take_buffers([answer.buffers for answer in answers])
        return number, answers

    def drop(self, number: int, count: int) -> None:
        """No backward will come of that call of the first ``count``."""
        for waiting in self.dropped[:count]:
            waiting.append(number)

    def _new_parameters(self, replica: int) -> list[int]:
        """Those that have changed since that process has made copies of them, if it has."""
        if self.devices[replica] == self.devices[0]:
            return []
        now = [version_of(parameter) for parameter in self.parameters]
        before, self._parameter_versions[replica] = self._parameter_versions[replica], now
        return [i for i, (mine, its) in enumerate(zip(now, before, strict=True)) if mine != its]

    def _new_buffers(self, replica: int) -> dict[int, torch.Tensor]:
        """Those of which that process has another version than the module."""
        now = versions_of(self._known.buffers, self._known.parts)
        before, self._versions[replica] = self._versions[replica], now
        return {
            index: self._known.buffers[index]
            for index, (mine, its) in enumerate(zip(now, before, strict=True))
            if mine != its
        }

    def _take_buffers(self, returned: Sequence[dict[int, torch.Tensor]]) -> None:
        """What the first replica has done to buffers stays."""
        changed_by_any = set().union(*returned)
        before = {index: self._known.buffers[index].clone() for index in changed_by_any}
        self._returned_buffers = [before | own for own in returned]
        for versions, changed in zip(self._versions, returned, strict=False):
            for index in changed:
                versions[index] = None
        for index, value in returned[0].items():
            self._write_buffer(index, value)

    def average_buffers(self) -> None:
        """Give the module the mean of what the last call has made of them."""
        for index, buffer in enumerate(self._known.buffers):
            returned = [own[index] for own in self._returned_buffers if index in own]
            if returned and buffer.is_floating_point():
                made = [value.to(buffer.device) for value in returned]
                self._write_buffer(index, torch.stack(made).mean(0))

    def _write_buffer(self, index: int, value: torch.Tensor) -> None:
        with torch.no_grad():
            self._known.buffers[index].copy_(value)

    def backward(self, messages: Sequence[Backward]) -> list[torch.Tensor | None]:
        """Run a backward, and return the gradients of the parameters and of all inputs."""
        answers: list[Derived] = self.ask(messages)
        of_inputs = [gradient for answer in answers for gradient in answer.of_inputs]
        return [*self._gradients.add_up(answers), *of_inputs]

    def ask(self, messages: Sequence[object]) -> list[Any]:
        """Send each process its message, and return what each has answered.

        Raises:
            ReplicaLost: If a process has ended.
            BaseException: What the first that failed has raised.
        """
        if not self.is_alive:
            raise ReplicaLost("The processes of the replicas that ran this have ended.")
        try:
            packed = [Packed(message) for message in messages]
        except Exception as error:
            raise TypeError(f"An argument can't be sent to other processes: {error}.") from error
        with self._or_end(), alone():
            outcomes = self._answers(packed)
        return values_of(outcomes, self.devices)

    def _answers(self, messages: Sequence[Packed]) -> list[Outcome[Any]]:
        """Send each process its message; return their answers, before which they may ask."""
        waiting = dict(enumerate(self._members[: len(messages)]))
        outcomes: list[Outcome[Any]] = [Outcome() for _ in waiting]
        sums: dict[int, Sum] = {}
        for number, member in waiting.items():
            member.send(messages[number])
        while waiting:
            for number in first_to_speak({n: m for n, m in waiting.items() if n not in sums}):
                answer = waiting[number].receive()
                if isinstance(answer, Ask):
                    waiting[number].send(Packed(_told(answer)))
                elif isinstance(answer, Sum):
                    sums[number] = answer
                else:
                    del waiting[number]
                    if isinstance(answer, Error):
                        outcomes[number].error = as_exception(answer)
                    else:
                        outcomes[number].value = answer
            if sums and len(sums) == len(waiting):
                total = _sum_of(sums)
                for number in sums:
                    waiting[number].send(Packed(total))
                sums = {}
        return outcomes

    @contextmanager
    def _or_end(self) -> Iterator[None]:
        """End all processes if something else goes wrong: what they are about to say is unknown."""
        try:
            yield
        except BaseException:
            self.is_alive = False
            self._end()
            raise


def _told(question: Ask) -> object:
    """What a replica is told that asks this."""
    try:
        return question.function(*question.arguments)
    except Exception as error:  # it is raised there
        return as_error(error)._replace(traceback="")


def _sum_of(sums: Mapping[int, Sum]) -> object:
    """What all are told that ask for these sums, by the number of the replica."""
    finish = next(iter(sums.values())).finish
    added = Round(finish and beyond(this_seat(), finish))
    added.parts = {number: question.own for number, question in sums.items()}
    added.add_up()
    if isinstance(added.error, Exception):
        return as_error(added.error)._replace(traceback="")
    if added.error is not None:
        raise added.error
    return added.total
