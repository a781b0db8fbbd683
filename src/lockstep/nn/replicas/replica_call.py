"""The call of one replica in this process: its forward and its backwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from lockstep.nn.replicas.gradients import Gradients
from lockstep.nn.replicas.nested import map_tensors

Arguments = tuple[Sequence[Any], dict[str, Any]]
Ends = Sequence[tuple[torch.Tensor, torch.Tensor]]


class ReplicaCall:
    """The call of one replica in this process.

    Args:
        device: The replica's device.
        leaves: The leaves that replace the module's parameters in it.
        call: The method to call.
        arguments: Its positional and keyword arguments.
        owns_inputs: Whether nobody else has the tensors among them.

    Attributes:
        inputs: The tensors among the arguments that require a gradient.
        outputs: All tensors among the results.
    """

    def __init__(
        self,
        device: torch.device,
        leaves: Sequence[torch.Tensor],
        call: Callable[..., Any],
        arguments: Arguments,
        *,
        owns_inputs: bool = False,
    ) -> None:
        self.device = device
        self.inputs: list[torch.Tensor] = []
        self.outputs: list[torch.Tensor] = []
        self._results: Any = None
        # The indices of outputs whose graph is freed, and of those in which a backward began last.
        self._freed: set[int] = set()
        self._begun: set[int] = set()
        self._call = call
        self._arguments = arguments
        self._leaves = leaves
        self._owns_inputs = owns_inputs
        self._input_leaves: list[torch.Tensor] = []  # these replace the inputs
        map_tensors(lambda t: self.inputs.append(t) if t.requires_grad else None, arguments)

    def forward(self) -> None:
        """Call the replica."""
        # See Note [Leaves]. Shown by test_inputs_may_be_modified_in_place.
        inputs = self.inputs[len(self._input_leaves) :]
        copies = [x.detach() if self._owns_inputs else x.detach().clone() for x in inputs]
        new_leaves = [x.requires_grad_() for x in copies]
        self._input_leaves = [*self._input_leaves, *new_leaves]
        mine = iter([_NoLeaf.apply(leaf) for leaf in new_leaves])  # type: ignore[no-untyped-call]
        args, kwargs = map_tensors(
            lambda t: next(mine) if t.requires_grad else t.data, self._arguments
        )
        self._results = self._call(*args, **kwargs)
        map_tensors(self.outputs.append, self._results)
        self._arguments = ((), {})  # free their memory

    def take_results(self) -> tuple[Any, list[torch.Tensor]]:
        """What the replica has returned, once, and the tensors in it."""
        results, self._results = self._results, None
        return results, self.outputs

    def start_backward(self, d_outputs: Gradients, *, keep_graph: bool) -> Ends:
        """The outputs in which a backward begins, with their gradients.

        Raises:
            RuntimeError: If the graph of one of them is freed.
        """
        self._begun = {i for i, gradient in enumerate(d_outputs) if gradient is not None}
        if self._begun & self._freed:
            raise RuntimeError(
                "A second backward through replicas whose first has let go of what it needs. Give "
                "the first retain_graph=True."
            )
        return [
            (output, gradient)
            for output, gradient in zip(self.outputs, d_outputs, strict=True)
            if gradient is not None and output.requires_grad
        ]

    def derivative(self, d_outputs: Gradients) -> ReplicaCall:
        """A call that runs this one's backward, and has a backward itself.

        Its inputs are those of this call and those of ``d_outputs`` that require a gradient; its
        results the gradients of the parameters, and those of this call's inputs.
        """
        call = ReplicaCall(self.device, self._leaves, self._differentiate, ((d_outputs,), {}))
        call.inputs[:0] = self.inputs
        call._input_leaves = self._input_leaves
        return call

    def _differentiate(self, d_outputs: Gradients) -> Gradients:
        leaves = [*self._leaves, *self._input_leaves]
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        ends = self.start_backward(d_outputs, keep_graph=True)
        if not ends or not wanted:
            return [None] * len(leaves)
        outputs, given = zip(*ends, strict=True)
        found = iter(
            torch.autograd.grad(outputs, wanted, given, create_graph=True, allow_unused=True)
        )
        return [next(found) if leaf.requires_grad else None for leaf in leaves]

    def free_graph(self) -> None:
        """Free the graph of those outputs in which the last backward began."""
        self._freed |= self._begun
        for index in self._begun:
            self.outputs[index] = self.outputs[index].detach()

    def take_gradients(self) -> tuple[Gradients, Gradients]:
        """The gradients of the parameters and of the inputs; the leaves have none then."""
        leaves = [*self._leaves, *self._input_leaves]
        gradients = [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        return gradients[: len(self._leaves)], gradients[len(self._leaves) :]


class _NoLeaf(torch.autograd.Function):
    """The same tensor, but one that may be written to, as a leaf must not be."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor) -> torch.Tensor:
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def run_backward(ends: Ends, keep_graph: bool) -> None:
    """Run the backward that begins in ``ends``; gradients add up in the leaves."""
    if ends:
        outputs, d_outputs = zip(*ends, strict=True)
        torch.autograd.backward(outputs, d_outputs, retain_graph=keep_graph)
