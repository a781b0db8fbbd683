"""Replicas in threads: kept from call to call, and brought only what has changed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lockstep.nn.replicas.apply import on_device
from lockstep.nn.replicas.boundary import Gradients, add_up, call_replicas
from lockstep.nn.replicas.meeting import attending
from lockstep.nn.replicas.tensors import map_tensors
from lockstep.nn.replicas.twins import Twin, own_tensors
from lockstep.nn.replicas.workers import WorkerThreads, values_of

Arguments = tuple[Sequence[Any], dict[str, Any]]


class Replicas:
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
                _Part(replica, getattr(replica.module, method), own)
                for replica, own in zip(replicas, arguments, strict=True)
            ]
            return call_replicas(_ThreadCall(parts, parameters, self._workers, self._lock))

    def average_buffers(self, module: nn.Module) -> None:
        """Give the module the mean of all replicas' floating-point buffers."""
        with self._lock, torch.no_grad():
            for buffer in own_tensors(list(module.modules()), "_buffers"):
                copies = [replica.tensor_for(buffer) for replica in self._replicas[1:]]
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
        parameters = list(own_tensors(parts, "_parameters"))
        buffers = list(own_tensors(parts, "_buffers"))
        self._check(parameters, buffers)
        for replica in self._replicas[:count]:
            replica.take_after(parameters, buffers)
        return parameters, self._replicas[:count]

    def _check(self, parameters: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor]) -> None:
        home = self._devices[0]
        for tensor in (*parameters, *buffers):
            if tensor.device != home:
                raise RuntimeError(
                    f"DataParallel's replicas start from the module on {home}, the first of its "
                    f"device_ids, and one of the module's tensors is on {tensor.device}. Move the "
                    f"module there: module.to({str(home)!r})."
                )
            if is_lazy(tensor):
                raise RuntimeError(
                    "A parameter has no shape yet. Run one forward of the bare module on a sample "
                    "before replicating it."
                )


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
        self._stand_ins: dict[int, _StandIn] = {}

    def is_of(self, parts: Sequence[nn.Module]) -> bool:
        """Whether the module consists of the same parts still."""
        return self._twin.is_twin_of(parts)

    def tensor_for(self, tensor: torch.Tensor) -> torch.Tensor:
        """What stands here for a parameter or buffer of the module."""
        return self._stand_ins[id(tensor)].tensor

    def take_after(
        self, parameters: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor]
    ) -> None:
        """Be what the module is now."""
        before, now = self._stand_ins, {}
        for kinds, tensors in ((_Leaf, parameters), (_Own if self._is_first else _Copy, buffers)):
            for tensor in tensors:
                known = before.get(id(tensor))
                if known is None or not known.holds(tensor):
                    known = kinds(tensor, self.device)
                now[id(tensor)] = known
        self._stand_ins = now
        self.leaves = [now[id(parameter)].tensor for parameter in parameters]
        self._twin.take_after({key: known.tensor for key, known in now.items()})


class _StandIn:
    """What stands in a replica for a tensor of the module."""

    tensor: torch.Tensor

    def __init__(self, original: torch.Tensor, device: torch.device) -> None:
        # Its id() is what it is found by, so it must not be another's.
        self._original = original
        self._device = device

    def holds(self, original: torch.Tensor) -> bool:
        """Whether it is still right, or has been made so."""
        raise NotImplementedError


class _Own(_StandIn):
    """A buffer itself."""

    def __init__(self, original: torch.Tensor, device: torch.device) -> None:
        super().__init__(original, device)
        self.tensor = original

    def holds(self, original: torch.Tensor) -> bool:
        return self.tensor is original


class _Copy(_StandIn):
    """A copy of a buffer, for a replica to write to: another one each time either has changed.

    What is overwritten may be needed for a backward that is still to come.
    """

    def __init__(self, original: torch.Tensor, device: torch.device) -> None:
        super().__init__(original, device)
        self.tensor = original.detach().to(device, copy=True)
        self._versions = self._versions_now()

    def _versions_now(self) -> tuple[object, object]:
        return _version(self._original), _version(self.tensor)

    def holds(self, original: torch.Tensor) -> bool:
        return self._original is original and self._versions == self._versions_now()


class _Leaf(_StandIn):
    """A leaf that shares a parameter's memory or, on another device, is a copy."""

    def __init__(self, original: torch.Tensor, device: torch.device) -> None:
        super().__init__(original, device)
        there = original.detach()
        self._is_shared = original.device == device
        if not self._is_shared:
            there = there.to(device)
        if isinstance(original, nn.Parameter):
            there = nn.Parameter(there, requires_grad=original.requires_grad)
            there.__dict__.update(original.__dict__)
        self.tensor = there.requires_grad_(original.requires_grad)
        self._version = _version(original)

    def holds(self, original: torch.Tensor) -> bool:
        leaf = self.tensor
        if self._original is not original or leaf.requires_grad != original.requires_grad:
            return False
        if self._is_shared:
            return leaf.dtype == original.dtype and leaf.is_set_to(original)
        if leaf.shape != original.shape or leaf.dtype != original.dtype:
            return False
        if self._version != (version := _version(original)):
            self._version = version
            with torch.no_grad():
                leaf.copy_(original, non_blocking=True)
        return True


def _version(tensor: torch.Tensor) -> object:
    """What changes whenever the tensor is written to."""
    # Inference tensors don't count: then it is never the same.
    return object() if tensor.is_inference() else (tensor.data_ptr(), tensor._version)


class _Part:
    """One replica's part of a call."""

    def __init__(self, replica: _Replica, call: Callable[..., Any], arguments: Arguments) -> None:
        self.device = replica.device
        self.inputs: list[torch.Tensor] = []
        self.outputs: list[torch.Tensor] = []
        self.results: Any = None
        self._is_over = False
        self._call = call
        self._arguments = arguments
        self._leaves = replica.leaves
        self._input_leaves: list[torch.Tensor] = []
        map_tensors(lambda t: self.inputs.append(t) if t.requires_grad else None, arguments)

    def forward(self) -> None:
        """Call the replica."""
        # See Note [Leaves]. Shown by test_inputs_may_be_modified_in_place.
        self._input_leaves = [x.detach().clone().requires_grad_() for x in self.inputs]
        mine = iter([_NoLeaf.apply(leaf) for leaf in self._input_leaves])  # type: ignore[no-untyped-call]
        args, kwargs = map_tensors(
            lambda t: next(mine) if t.requires_grad else t.data, self._arguments
        )
        self.results = self._call(*args, **kwargs)
        map_tensors(self.outputs.append, self.results)
        self._arguments = ((), {})  # wanted no more, and their memory may be

    def ends(self, d_outputs: Gradients) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Where its backward begins, and with which gradients."""
        if self._is_over:
            raise RuntimeError(
                "A second backward through replicas whose first has let go of what it needs. Give "
                "the first retain_graph=True."
            )
        return [
            (output, gradient)
            for output, gradient in zip(self.outputs, d_outputs, strict=True)
            if gradient is not None and output.requires_grad
        ]

    def forget(self) -> None:
        """Let go of the graph."""
        self.outputs = [output.detach() for output in self.outputs]
        self._is_over = True

    def take_gradients(self) -> tuple[Gradients, Gradients]:
        """Those of the parameters and of the inputs; the leaves have none then."""
        return _take(self._leaves), _take(self._input_leaves)


def _take(leaves: Sequence[torch.Tensor]) -> Gradients:
    gradients = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    return gradients


class _NoLeaf(torch.autograd.Function):
    """The same tensor, but one that may be written to, as a leaf must not be."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor) -> torch.Tensor:
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class _ThreadCall:
    """One call of all replicas, in their threads."""

    def __init__(
        self,
        parts: Sequence[_Part],
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
            partial(_run_backward, own if here else [], keep_graph)
            for own, here in zip(ends, on_cpu, strict=True)
        ]
        # Autograd has one thread for each accelerator, and this may be it: no other thread could
        # wait for it. A backward that is run from it goes on in it, and in those of the others.
        elsewhere = [end for own, here in zip(ends, on_cpu, strict=True) if not here for end in own]
        outcomes = self._workers.run(tasks, meanwhile=partial(_run_backward, elsewhere, keep_graph))
        values_of(outcomes, self._devices)


def _run_backward(ends: Sequence[tuple[torch.Tensor, torch.Tensor]], keep_graph: bool) -> None:
    if ends:
        outputs, d_outputs = zip(*ends, strict=True)
        torch.autograd.backward(outputs, d_outputs, retain_graph=keep_graph)
