"""A replica that is kept: its parameters and buffers, and its forwards and backwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from lockstep.nn.replicas.module_copy import (
    LinkedEmbedding,
    ModuleCopy,
    ModuleState,
    linked_embeddings_in,
    version_of,
)
from lockstep.nn.replicas.nested import map_tensors, tensors_in

Gradients = list[torch.Tensor | None]
Arguments = tuple[Sequence[Any], dict[str, Any]]
Ends = Sequence[tuple[torch.Tensor, torch.Tensor]]


class KeptReplica:
    """A replica that is kept from call to call.

    Note [Leaves]: a replica's parameters are leaves of its own graph. On the parameter's device the
    leaf shares the parameter's memory and version counter, so autograd detects the same in-place
    writes as without replicas. Inputs are copied instead: the inputs of all replicas are views of
    one tensor with one version counter, and autograd would take an in-place write of one replica
    for a write to the inputs of all.

    A replica that ``shares_buffers`` uses the module's, which keep its writes. Others have
    copies, so that writing the mean of all replicas' buffers to the module doesn't change
    tensors that a replica saved for its backward.
    """

    def __init__(self, original: nn.Module, device: torch.device, *, shares_buffers: bool) -> None:
        self.device = device
        self.modules = [*original.modules()]
        self.leaves: list[torch.Tensor] = []  # the replica's parameters
        self.buffers: list[torch.Tensor] = []  # empty if it uses the module's
        self._copy = ModuleCopy(original)
        self.module = self._copy.module
        self._shares_buffers = shares_buffers
        self._copies: dict[int, _Leaf | _Buffer] = {}

    def update(self, state: ModuleState) -> None:
        """Bring the replica to the state of the module."""
        earlier, self._copies = self._copies, {}
        linked = linked_embeddings_in(state.modules)
        for original in state.parameters:
            copy = earlier.get(id(original))
            if not isinstance(copy, _Leaf) or not copy.is_current(original):
                copy = _Leaf(original, self.device, is_linked=id(original) in linked)
            self._copies[id(original)] = copy
        self.leaves = [copy.tensor for copy in self._copies.values()]
        if not self._shares_buffers:
            for original, version in zip(state.buffers, state.versions, strict=True):
                copy = earlier.get(id(original))
                if not isinstance(copy, _Buffer) or not copy.is_current(version):
                    copy = _Buffer(original, version, self.device)
                self._copies[id(original)] = copy
            self.buffers = [self._copies[id(original)].tensor for original in state.buffers]
        self._copy.update({key: copy.tensor for key, copy in self._copies.items()})


class _Leaf:
    """A leaf that shares a parameter's memory or, on another device, has a copy of it."""

    def __init__(self, original: torch.Tensor, device: torch.device, *, is_linked: bool) -> None:
        self._original = original  # its id() is the key of this leaf, and must not be reused
        self._version = version_of(original)
        self._is_shared = original.device == device
        there = original.detach()
        if not self._is_shared:
            there = there.to(device)
        if isinstance(original, nn.Parameter):
            kind = LinkedEmbedding if is_linked else nn.Parameter
            there = kind(there, requires_grad=original.requires_grad)
            there.__dict__.update(original.__dict__)
        self.tensor = there.requires_grad_(original.requires_grad)

    def is_current(self, original: torch.Tensor) -> bool:
        """Whether it is a leaf for ``original``; a copy on another device is updated here."""
        leaf = self.tensor
        if (leaf.requires_grad, leaf.dtype) != (original.requires_grad, original.dtype):
            return False
        if leaf.shape != original.shape:
            return False
        if self._is_shared:
            return leaf.is_meta or leaf.is_set_to(original)
        if self._version != (version := version_of(original)):
            self._version = version
            with torch.no_grad():
                # The CPU would read a copy that goes on meanwhile.
                leaf.copy_(original, non_blocking=leaf.device.type != "cpu")
        return True


class _Buffer:
    """A replica's copy of a buffer, replaced by a new copy when either has changed.

    The copy isn't updated in place, as a later backward may need the value that it saved.
    """

    def __init__(self, original: torch.Tensor, version: object, device: torch.device) -> None:
        self._original, self._version = original, version  # see _Leaf
        self.tensor = original.detach().to(device, copy=True)
        self._copy_version = version_of(self.tensor)

    def is_current(self, version: object) -> bool:
        return self._version == version and self._copy_version == version_of(self.tensor)


class ReplicaCall:
    """One forward of a replica, ``call(*arguments)``, and its backwards.

    Attributes:
        inputs: The tensors among the arguments that require a gradient.
        results: The result of the forward.
    """

    def __init__(
        self,
        device: torch.device,
        leaves: Sequence[torch.Tensor],
        call: Callable[..., Any],
        arguments: Arguments,
    ) -> None:
        self.device = device
        self.inputs = [x for x in tensors_in(arguments) if x.requires_grad]
        self.results: Any = None
        self._outputs: list[torch.Tensor | None] = []  # None once its graph is freed
        self._roots: list[int] = []  # the indices of outputs from which the last backward started
        self._call = call
        self._arguments = arguments
        self._leaves = leaves
        self._input_leaves: list[torch.Tensor] = []  # which replace the inputs

    def forward(self) -> None:
        """Call the replica."""
        args, kwargs = map_tensors(self._input_for, self._arguments)
        self.results = self._call(*args, **kwargs)
        self._outputs = [*tensors_in(self.results)]
        self._arguments = ((), {})  # free their memory

    def _input_for(self, argument: torch.Tensor) -> torch.Tensor:
        if not argument.requires_grad:
            return argument.data
        self._input_leaves.append(argument.detach().requires_grad_())
        # See Note [Leaves]. Shown by test_inputs_may_be_modified_in_place.
        return self._input_leaves[-1].clone()

    def start_backward(self, d_outputs: Gradients) -> Ends:
        """Return the outputs from which a backward starts, each with its gradient."""
        self._roots = [i for i, gradient in enumerate(d_outputs) if gradient is not None]
        if any(self._outputs[index] is None for index in self._roots):
            raise RuntimeError(
                "A second backward through replicas whose first has let go of what it needs. Give "
                "the first retain_graph=True."
            )
        pairs = zip(self._outputs, d_outputs, strict=True)
        return [
            (end, g) for end, g in pairs if end is not None and g is not None and end.requires_grad
        ]

    def derivative(self, d_outputs: Gradients) -> ReplicaCall:
        """Return a call whose forward is the backward of this one, for a double backward.

        Its inputs are this call's inputs and the ``d_outputs`` that require a gradient. Its results
        are the gradients of the parameters and of this call's inputs.
        """
        call = ReplicaCall(self.device, self._leaves, self._differentiate, ((d_outputs,), {}))
        call.inputs[:0] = self.inputs
        call._input_leaves = [*self._input_leaves]
        return call

    def _differentiate(self, d_outputs: Gradients) -> Gradients:
        leaves = [*self._leaves, *self._input_leaves]
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        ends = self.start_backward(d_outputs)
        if not ends or not wanted:
            return [None] * len(leaves)
        outputs, given = zip(*ends, strict=True)
        found = torch.autograd.grad(outputs, wanted, given, create_graph=True, allow_unused=True)
        of_leaf = dict(zip(map(id, wanted), found, strict=True))
        return [of_leaf.get(id(leaf)) for leaf in leaves]

    def free_graph(self) -> None:
        """Free the graph of the outputs from which the last backward started."""
        for index in self._roots:
            self._outputs[index] = None

    def take_gradients(self) -> tuple[Gradients, Gradients]:
        """Return the gradients of the parameters and of the inputs; reset those of the leaves."""
        leaves = [*self._leaves, *self._input_leaves]
        gradients = [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        return gradients[: len(self._leaves)], gradients[len(self._leaves) :]


def run_backward(ends: Ends, keep_graph: bool) -> None:
    """Run a backward from the outputs ``ends``; it accumulates gradients in the leaves."""
    if ends:
        outputs, d_outputs = zip(*ends, strict=True)
        torch.autograd.backward(outputs, d_outputs, retain_graph=keep_graph)
