"""The processes of a module's replicas, as the caller has them, and what they know."""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from lockstep.errors import ReplicaLost
from lockstep.nn.replicas.apply import on_device
from lockstep.nn.replicas.boundary import Gradients
from lockstep.nn.replicas.gradients import GradientsElsewhere
from lockstep.nn.replicas.known import Known
from lockstep.nn.replicas.meeting import Meeting
from lockstep.nn.replicas.member import Member, answers_of, end_members
from lockstep.nn.replicas.messages import (
    Backward,
    Buffers,
    Call,
    Derived,
    Module,
    Returned,
    Tensors,
)
from lockstep.nn.replicas.modes import Modes
from lockstep.nn.replicas.part import Arguments
from lockstep.nn.replicas.shared import share
from lockstep.nn.replicas.tables import tables_in
from lockstep.nn.replicas.tensors import tensors_in
from lockstep.nn.replicas.twins import check_home, trained_and_buffers, version_of, versions_of
from lockstep.nn.replicas.wire import Packed
from lockstep.nn.replicas.workers import Outcome, WorkerThreads, is_interruption, nothing, values_of

# How long processes may take to start, whatever the timeout: they import torch.
_START_SECONDS = 120.0


class Crew:
    """The processes of all replicas but the first, and what they know.

    Attributes:
        is_alive: Whether all of them are there.
        pid: Of whoever has started them.
        parameters: Those of the module that they have.
        buffers: Likewise.
        dropped: For each process calls of which no backward will come; it is told with its next.

    Args:
        devices: One for each replica, the first included.
        timeout: How many seconds to wait for what a process is to do.
    """

    def __init__(self, devices: Sequence[torch.device], timeout: float) -> None:
        self.is_alive = True
        self.pid = os.getpid()
        self.parameters: list[torch.Tensor] = []
        self.buffers: list[torch.Tensor] = []
        self.dropped: list[list[int]] = [[] for _ in devices[1:]]
        self._devices, self._home, self._timeout = devices, devices[0], timeout
        self._numbers = itertools.count()
        self._known = Known([], [], [])
        self._gradients = GradientsElsewhere([], self._home, 0)
        # For each process, which version of each parameter and buffer it has.
        self._parameter_versions: list[list[object]] = []
        self._versions: list[list[object]] = []
        # Which buffers those have changed that were called last.
        self._changed: list[list[int]] = []
        self._members = [Member(number, devices) for number in range(1, len(devices))]
        self._workers = WorkerThreads(2, len(devices), "lockstep-listener")
        self._end = weakref.finalize(self, end_members, self._members)

    def take(self, module: nn.Module) -> None:
        """Let all have the module, as it is now."""
        parts = list(module.modules())
        parameters, buffers = trained_and_buffers(parts)
        if not self._known.is_still(parts, parameters, buffers):
            check_home([*parameters, *buffers], self._home)
            self._send_module(module, parameters, buffers)
            self._known = Known(parts, parameters, buffers)
        self.parameters, self.buffers = parameters, buffers

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
        self._gradients = GradientsElsewhere(parameters, self._home, len(self._members))
        tensors = [
            Tensors(shared, places, flags, are_parameters, are_tables, buffers)
            for places, flags in zip(self._gradients.places, self._gradients.flags, strict=True)
        ]
        with self._or_end(), closing(self._gradients):
            for packed in ([*map(Packed, tensors)], modules):
                values_of(self._tell(packed, at_least=_START_SECONDS), self._devices)
        versions = versions_of(buffers, parts)
        self._versions = [list(versions) for _ in self._members]
        versions = [version_of(parameter) for parameter in parameters]
        self._parameter_versions = [list(versions) for _ in self._members]

    def call(
        self,
        method: str,
        arguments: Sequence[Arguments],
        modes: Modes,
        meanwhile: Callable[[], None],
    ) -> tuple[int, list[Returned]]:
        """Call that method of all replicas but the first, and do that one's part ``meanwhile``.

        Returns:
            The number of the call, and what each has answered.
        """
        number, dropped = next(self._numbers), [own[:] for own in self.dropped]
        training = [part.training for part in self._known.parts]
        trained = [parameter.requires_grad for parameter in self.parameters]
        meeting = Meeting(1 + len(arguments), in_processes=True)
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
                    self._new_parameters(which),
                    self._new_buffers(which),
                    dropped[which],
                    meeting.count,
                    meeting.num_around,
                )
                for which, own in enumerate(arguments)
            ]

            def attend() -> None:
                with meeting.attended_by(0):
                    meanwhile()

            answers: list[Returned] = self._ask(messages, attend, meeting)
        except BaseException:
            # Some may have done it: what they have isn't known, and no backward comes.
            self._versions = [[None] * len(self.buffers) for _ in self._members]
            self._parameter_versions = [[None] * len(self.parameters) for _ in self._members]
            self.drop(number, len(arguments))
            raise
        finally:
            # What replicas do to containers is no news: the first one has the module's own.
            self._known.take_lengths()
        for waiting, told in zip(self.dropped, dropped[: len(arguments)], strict=False):
            del waiting[: len(told)]
        self._changed = [answer.changed for answer in answers]
        for versions, changed in zip(self._versions, self._changed, strict=False):
            for index in changed:
                versions[index] = None
        return number, answers

    def drop(self, number: int, count: int) -> None:
        """No backward will come of that call of the first ``count``."""
        for waiting in self.dropped[:count]:
            waiting.append(number)

    def _new_parameters(self, which: int) -> list[int]:
        """Those that have changed since that process has made copies of them, if it has."""
        if self._members[which].device == self._home:
            return []
        now = [version_of(parameter) for parameter in self.parameters]
        before, self._parameter_versions[which] = self._parameter_versions[which], now
        return [i for i, (mine, its) in enumerate(zip(now, before, strict=True)) if mine != its]

    def _new_buffers(self, which: int) -> dict[int, torch.Tensor]:
        """Those of which that process has another version than the module."""
        now = versions_of(self.buffers, self._known.parts)
        before, self._versions[which] = self._versions[which], now
        return {
            index: self.buffers[index]
            for index, (mine, its) in enumerate(zip(now, before, strict=True))
            if mine != its
        }

    def changed_buffers(self, more: Collection[int]) -> dict[int, list[torch.Tensor]]:
        """What each process that was called last has made of buffers that any has changed.

        Args:
            more: Others that are wanted, too.
        """
        wanted = sorted(set(more).union(*self._changed))
        answers = self._ask([Buffers(wanted)] * len(self._changed)) if wanted else ()
        return {index: list(values) for index, *values in zip(wanted, *answers, strict=False)}

    def backward(
        self, messages: Sequence[Backward], meanwhile: Callable[[], Gradients]
    ) -> tuple[list[Gradients], list[Gradients]]:
        """Run a backward of all replicas but the first, and that one's ``meanwhile``.

        Args:
            messages: One for each.
            meanwhile: Returns the first one's gradients of the parameters. Those of the others are
                added to them, as far as they have come by then.

        Returns:
            What is still to be added to these, in this order, some of it in memory that the next
            backward writes to; and for each of the other replicas the gradients of its inputs.
        """
        self._check_alive()
        gradients = self._gradients
        gradients.begin()
        try:
            answers: list[Derived] = self._ask(
                messages, lambda: gradients.add_those_there(meanwhile())
            )
        finally:
            self._known.take_lengths()  # as in call
        rests = [
            gradients.rest(number, answer.in_place, answer.others)
            for number, answer in enumerate(answers)
        ]
        parts = [first for first, _ in rests] + [later for _, later in rests]
        return parts, [answer.of_inputs for answer in answers]

    def _ask(
        self,
        messages: Sequence[object],
        meanwhile: Callable[[], None] = nothing,
        meeting: Meeting | None = None,
    ) -> list[Any]:
        """Send each process its message, do something, and return what each has answered.

        Args:
            messages: One for each of as many processes.
            meanwhile: What the first replica does, in this thread.
            meeting: Where the replicas add something up.

        Raises:
            ReplicaLost: If a process has ended, or doesn't answer within the timeout.
            BaseException: What the first replica that failed has raised.
        """
        self._check_alive()
        try:
            packed = [Packed(message) for message in messages]
        except Exception as error:
            raise TypeError(f"An argument can't be sent to other processes: {error}.") from error
        with self._or_end():
            outcomes = self._tell(packed, meanwhile, meeting)
        return values_of(outcomes, self._devices)[1:]

    def _check_alive(self) -> None:
        if not self.is_alive or self.pid != os.getpid():
            raise ReplicaLost(
                "The processes of the replicas that ran this have ended, or are those of the "
                "process that this one was forked from. Call the model again."
            )

    def _tell(
        self,
        messages: Sequence[Packed],
        meanwhile: Callable[[], None] = nothing,
        meeting: Meeting | None = None,
        at_least: float = 0,
    ) -> list[Outcome[Any]]:
        """The same; return what came of ``meanwhile`` and of each message."""
        members = self._members[: len(messages)]
        timeout = max(self._timeout, at_least)
        for member in members:
            member.set_timeout(timeout)
        are_told = False

        def send() -> None:
            nonlocal are_told
            try:
                for member, message in zip(members, messages, strict=True):
                    member.send(message)
                are_told = True
            finally:
                if not are_told:
                    self._kill()  # or who listens would wait for them
            meanwhile()

        # Another thread listens: this one is busy, and what is asked in a backward can't wait.
        # What arrives on a device is to be on the stream that the caller has there.
        listen: Callable[[], Any] = partial(answers_of, members, meeting, timeout)
        for device in dict.fromkeys(self._devices):
            listen = on_device(device, listen)
        mine, others = self._workers.run([send, listen], interrupted=self._kill)
        if mine.error is not None and (not are_told or is_interruption(mine.error)):
            raise mine.error
        if others.error is not None:
            if mine.error is not None and mine.error is not others.error:
                others.error.add_note(f"Replica 0 failed as well: {mine.error!r}")
            raise others.error
        return [mine, *(others.value or ())]

    def _kill(self) -> None:
        for member in self._members:
            member.kill()

    @contextmanager
    def _or_end(self) -> Iterator[None]:
        """End all processes if something else goes wrong: what they are about to say is unknown."""
        try:
            yield
        except BaseException:
            self.is_alive = False
            self._end()
            raise
