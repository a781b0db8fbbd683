"""Replicas in threads: kept from call to call, and brought only what has changed."""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn

from lockstep.nn.replicas.apply import on_device
from lockstep.nn.replicas.boundary import Gradients, add_up, call_replicas
from lockstep.nn.replicas.meeting import attending
from lockstep.nn.replicas.part import Arguments, Part, run_backward
from lockstep.nn.replicas.tables import leaf_as_table, tables_in
from lockstep.nn.replicas.twins import (
    Twin,
    check_home,
    trained_and_buffers,
    version_of,
    versions_of,
)
from lockstep.nn.replicas.workers import WorkerThreads, values_of


class ThreadReplicas:
    """A module's replicas, each with a thread of this process.

    Note [Leaves]: a replica's parameters are leaves of its own graph. On the device of a parameter
    its leaf shares memory and version with it: what is written to one is written to both, and
    autograd notices what it would have noticed without replicas. Inputs are not shared so: those
    of all replicas are views of one tensor, with one version, and autograd would take what one
    replica does to its own in place for a change of the others'.

    Args:
        devices: Where they are; on the first is the module, too.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = list(devices)
        self._replicas: list[_Replica] = []
        self._workers = WorkerThreads(len(devices))
        # What a call does to the replicas, another thread's must not do at the same time.
        self._lock = threading.RLock()

    def call(self, module: nn.Module, method: str, arguments: Sequence[Arguments]) -> list[Any]:
        """Call that method of as many replicas as there are ``arguments``, each on its own.

        Returns:
            What each has returned.
        """
        with self._lock:
            parameters, replicas = self._renew(module, len(arguments))
            parts = [
                Part(replica.device, replica.leaves, getattr(replica.module, method), own)
                for replica, own in zip(replicas, arguments, strict=True)
            ]
            return call_replicas(_ThreadCall(parts, parameters, self._workers, self._lock))

    def average_buffers(self, module: nn.Module, count: int) -> None:
        """Give the module the mean of the first ``count`` replicas' floating-point buffers."""
        with self._lock, torch.no_grad():
            for buffer in trained_and_buffers(list(module.modules()))[1]:
                copies = [replica.copy_of(buffer) for replica in self._replicas[1:count]]
                if buffer.is_floating_point() and copies:
                    there = [copied.to(buffer.device) for copied in copies]
                    buffer.copy_(torch.stack([buffer, *there]).mean(0))

    def _renew(self, module: nn.Module, count: int) -> tuple[list[torch.Tensor], list[_Replica]]:
        """The module's parameters, and so many replicas that are as it is now."""
        parts = list(module.modules())
        if not self._replicas or not self._replicas[0].is_of(parts):
            self._replicas = [
                _Replica(module, device, is_first=number == 0)
                for number, device in enumerate(self._devices)
            ]
        parameters, buffers = trained_and_buffers(parts)
        check_home([*parameters, *buffers], self._devices[0])
        versions, tables = versions_of(buffers, parts), tables_in(parts)
        for replica in self._replicas[:count]:
            replica.take_after(parameters, buffers, versions, tables)
        return parameters, self._replicas[:count]


class _Replica:
    """One replica: a twin of the module, and what stands in it for the module's tensors.

    Attributes:
        device: Where it is.
        module: The replica.
        leaves: What stands for each of the module's parameters, in their order.
    """

    def __init__(self, original: nn.Module, device: torch.device, *, is_first: bool) -> None:
        self.device = device
        self.leaves: list[torch.Tensor] = []
        self._twin = Twin(original)
        self.module = self._twin.module
        self._is_first = is_first
        # By the id() of what they stand for.
        self._leaves: dict[int, _Leaf] = {}
        self._copies: dict[int, _Copy] = {}

    def is_of(self, parts: Sequence[nn.Module]) -> bool:
        """Whether the module consists of the same parts still."""
        return self._twin.is_twin_of(parts)

    def copy_of(self, buffer: torch.Tensor) -> torch.Tensor:
        """What stands here for a buffer of the module."""
        return self._copies[id(buffer)].tensor

    def take_after(
        self,
        parameters: Sequence[torch.Tensor],
        buffers: Sequence[torch.Tensor],
        versions: Sequence[object],
        tables: Collection[int],
    ) -> None:
        """Be what the module is now.

        Args:
            parameters: The module's.
            buffers: The module's.
            versions: What is another one if a buffer has changed.
            tables: The ``id()`` of those parameters that replicas look up together.
        """
        leaves, self._leaves = self._leaves, {}
        for parameter in parameters:
            leaf = leaves.get(id(parameter))
            if leaf is None or not leaf.is_still_that_of(parameter):
                leaf = _Leaf(parameter, self.device, is_table=id(parameter) in tables)
            self._leaves[id(parameter)] = leaf
        copies, self._copies = self._copies, {}
        # The first has the module's own: what it does to them stays.
        for buffer, version in zip(buffers, versions, strict=True) if not self._is_first else ():
            copied = copies.get(id(buffer))
            if copied is None or not copied.is_still_that_of(buffer, version):
                copied = _Copy(buffer, version, self.device)
            self._copies[id(buffer)] = copied
        self.leaves = [leaf.tensor for leaf in self._leaves.values()]
        tensors = {key: leaf.tensor for key, leaf in self._leaves.items()}
        tensors |= {key: copied.tensor for key, copied in self._copies.items()}
        self._twin.take_after(tensors)


class _Copy:
    """A copy of a buffer, for a replica to write to: another one each time either has changed.

    What is overwritten may be needed for a backward that is still to come.
    """

    def __init__(self, original: torch.Tensor, version: object, device: torch.device) -> None:
        # Its id() is what it is found by, and so must not become another's.
        self._original = original
        self._version = version
        self.tensor = original.detach().to(device, copy=True)
        self._own_version = version_of(self.tensor)

    def is_still_that_of(self, original: torch.Tensor, version: object) -> bool:
        """Whether neither has changed."""
        return (
            self._original is original
            and self._version == version
            and self._own_version == version_of(self.tensor)
        )


class _Leaf:
    """A leaf that shares a parameter's memory or, on another device, is a copy."""

    def __init__(self, original: torch.Tensor, device: torch.device, *, is_table: bool) -> None:
        self._original = original
        self._version = version_of(original)
        self._is_shared = original.device == device
        there = original.detach()
        if not self._is_shared:
            there = there.to(device)
        if isinstance(original, nn.Parameter):
            there = nn.Parameter(there, requires_grad=original.requires_grad)
            there = leaf_as_table(there) if is_table else there
            there.__dict__.update(original.__dict__)
        self.tensor = there.requires_grad_(original.requires_grad)

    def is_still_that_of(self, original: torch.Tensor) -> bool:
        """Whether it stands for that parameter, as it is now; a copy is told what has changed."""
        leaf = self.tensor
        if self._original is not original or leaf.requires_grad != original.requires_grad:
            return False
        if self._is_shared:
            return leaf.dtype == original.dtype and leaf.is_set_to(original)
        if leaf.shape != original.shape or leaf.dtype != original.dtype:
            return False
        if self._version != (version := version_of(original)):
            self._version = version
            with torch.no_grad():
                leaf.copy_(original, non_blocking=True)
        return True


class _ThreadCall:
    """One call of all replicas, in their threads."""

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
            tasks = [on_device(part.device, part.forward) for part in self._parts]
            values_of(self._workers.run(attending(tasks)), self._devices)
        self.results = [part.results for part in self._parts]
        for part in self._parts:
            part.results = None
        return [(output, output.requires_grad) for part in self._parts for output in part.outputs]

    def backward(self, d_outputs: Sequence[torch.Tensor | None], *, keep_graph: bool) -> Gradients:
        """Run the backward of all."""
        mine = iter(d_outputs)
        with self._lock:
            ends = [part.ends([next(mine) for _ in part.outputs]) for part in self._parts]
            try:
                self._run_backwards(ends, keep_graph)
            finally:
                # Also those of a backward that failed: the next one is not to have them.
                taken = [part.take_gradients() for part in self._parts]
        if not keep_graph:
            for part in self._parts:
                part.forget()
        sums = add_up([of_parameters for of_parameters, _ in taken], self._homes)
        return [*sums, *(gradient for _, of_inputs in taken for gradient in of_inputs)]

    def _run_backwards(
        self, ends: Sequence[list[tuple[torch.Tensor, torch.Tensor]]], keep_graph: bool
    ) -> None:
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
