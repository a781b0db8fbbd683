"""A replica in this process: its tensors, and its calls with their forward and backwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from lockstep.nn.replicas.gradients import Gradients
from lockstep.nn.replicas.linked_embedding import LinkedEmbedding, linked_embeddings_in
from lockstep.nn.replicas.module_copy import ModuleCopy, ModuleState, version_of
from lockstep.nn.replicas.nested import map_tensors, tensors_in

Arguments = tuple[Sequence[Any], dict[str, Any]]
Ends = Sequence[tuple[torch.Tensor, torch.Tensor]]


class LocalReplica:
    """A replica in this process, which is kept from call to call.

    Note [Leaves]: a replica's parameters are leaves of its own graph. On the device of a parameter
    its leaf shares memory and version with it: what is written to one is written to both, and
    autograd notices what it would have noticed without replicas. Inputs are not shared so: those
    of all replicas are views of one tensor, with one version, and autograd would take what one
    replica does to its own in place for a change of the others'.

    A replica that ``owns_buffers`` has the module's own, so that changes to them stay. Another has
    copies, and what it saves for its backward isn't written to when the module gets the mean of all
    replicas' buffers.
    """

    def __init__(self, original: nn.Module, device: torch.device, *, owns_buffers: bool) -> None:
        self.device = device
        self.parts = [*original.modules()]
        self.leaves: list[torch.Tensor] = []  # its parameters
        self.buffers: list[torch.Tensor] = []  # copies of the module's, if it has them
        self._copy = ModuleCopy(original)
        self.module = self._copy.module
        self._owns_buffers = owns_buffers
        self._copies: dict[int, _Leaf | _Buffer] = {}

    def update(self, state: ModuleState) -> None:
        """Bring the replica to the state of the module."""
        earlier, self._copies = self._copies, {}
        linked = linked_embeddings_in(state.parts)
        for own in state.parameters:
            copy = earlier.get(id(own))
            if not isinstance(copy, _Leaf) or not copy.is_current(own):
                copy = _Leaf(own, self.device, is_linked=id(own) in linked)
            self._copies[id(own)] = copy
        self.leaves = [copy.tensor for copy in self._copies.values()]
        if not self._owns_buffers:
            for own, version in zip(state.buffers, state.versions, strict=True):
                copy = earlier.get(id(own))
                if not isinstance(copy, _Buffer) or not copy.is_current(own, version):
                    copy = _Buffer(own, version, self.device)
                self._copies[id(own)] = copy
            self.buffers = [self._copies[id(own)].tensor for own in state.buffers]
        self._copy.update({key: copy.tensor for key, copy in self._copies.items()})


class _Leaf:
    """A leaf that shares a parameter's memory or, on another device, is a copy."""

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
        """Whether it still is that parameter's leaf; a copy is given a changed value here."""
        leaf = self.tensor
        if self._original is not original or leaf.requires_grad != original.requires_grad:
            return False
        if leaf.dtype != original.dtype or leaf.shape != original.shape:
            return False
        if self._is_shared:
            return leaf.is_meta or leaf.is_set_to(original)
        if self._version != (version := version_of(original)):
            self._version = version
            with torch.no_grad():
                leaf.copy_(original, non_blocking=True)
        return True


class _Buffer:
    """A copy of a buffer, for a replica to write to; replaced when either has changed.

    An earlier value may be needed for a backward that is still to come.
    """

    def __init__(self, original: torch.Tensor, version: object, device: torch.device) -> None:
        self._original, self._version = original, version
        self.tensor = original.detach().to(device, copy=True)
        self._own_version = version_of(self.tensor)

    def is_current(self, original: torch.Tensor, version: object) -> bool:
        is_same = self._original is original and self._version == version
        return is_same and self._own_version == version_of(self.tensor)


class ReplicaCall:
    """The call of one replica in this process: of ``call``, with ``arguments``.

    ``leaves`` replace the module's parameters in it, ``inputs`` are the tensors among the arguments
    that require a gradient, and ``results`` is what the replica has returned.
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
        self._outputs: list[torch.Tensor] = []
        # The indices of outputs whose graph is freed, and of those in which a backward began last.
        self._freed: set[int] = set()
        self._begun: set[int] = set()
        self._call = call
        self._arguments = arguments
        self._leaves = leaves
        self._input_leaves: list[torch.Tensor] = []  # these replace the inputs

    def forward(self) -> None:
        """Call the replica."""
        args, kwargs = map_tensors(self._own, self._arguments)
        self.results = self._call(*args, **kwargs)
        self._outputs = tensors_in(self.results)
        self._arguments = ((), {})  # free their memory

    def _own(self, argument: torch.Tensor) -> torch.Tensor:
        if not argument.requires_grad:
            return argument.data
        self._input_leaves.append(argument.detach().requires_grad_())
        # See Note [Leaves]. Shown by test_inputs_may_be_modified_in_place.
        return self._input_leaves[-1].clone()

    def start_backward(self, d_outputs: Gradients, *, keep_graph: bool) -> Ends:
        """The outputs in which a backward begins, with their gradients."""
        self._begun = {i for i, gradient in enumerate(d_outputs) if gradient is not None}
        if self._begun & self._freed:
            raise RuntimeError(
                "A second backward through replicas whose first has let go of what it needs. Give "
                "the first retain_graph=True."
            )
        return [
            (output, gradient)
            for output, gradient in zip(self._outputs, d_outputs, strict=True)
            if gradient is not None and output.requires_grad
        ]

    def derivative(self, d_outputs: Gradients) -> ReplicaCall:
        """A call that runs this one's backward, and has a backward itself.

        Its inputs are those of this call and those of ``d_outputs`` that require a gradient; its
        results the gradients of the parameters, and those of this call's inputs.
        """
        call = ReplicaCall(self.device, self._leaves, self._differentiate, ((d_outputs,), {}))
        call.inputs[:0] = self.inputs
        call._input_leaves = [*self._input_leaves]
        return call

    def _differentiate(self, d_outputs: Gradients) -> Gradients:
        leaves = [*self._leaves, *self._input_leaves]
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        ends = self.start_backward(d_outputs, keep_graph=True)
        if not ends or not wanted:
            return [None] * len(leaves)
        outputs, given = zip(*ends, strict=True)
        found = torch.autograd.grad(outputs, wanted, given, create_graph=True, allow_unused=True)
        of_leaf = dict(zip(map(id, wanted), found, strict=True))
        return [of_leaf.get(id(leaf)) for leaf in leaves]

    def free_graph(self) -> None:
        """Free the graph of those outputs in which the last backward began."""
        self._freed |= self._begun
        for index in self._begun:
            self._outputs[index] = self._outputs[index].detach()

    def take_gradients(self) -> tuple[Gradients, Gradients]:
        """The gradients of the parameters and of the inputs; the leaves have none then."""
        leaves = [*self._leaves, *self._input_leaves]
        gradients = [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        return gradients[: len(self._leaves)], gradients[len(self._leaves) :]


def run_backward(ends: Ends, keep_graph: bool) -> None:
    """Run the backward that begins in ``ends``; gradients add up in the leaves."""
    if ends:
        outputs, d_outputs = zip(*ends, strict=True)
        torch.autograd.backward(outputs, d_outputs, retain_graph=keep_graph)
