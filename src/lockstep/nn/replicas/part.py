"""One replica's part of a call, in whichever thread or process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from lockstep.nn.replicas.boundary import Gradients
from lockstep.nn.replicas.tensors import map_tensors

Arguments = tuple[Sequence[Any], dict[str, Any]]
Ends = Sequence[tuple[torch.Tensor, torch.Tensor]]


class Part:
    """One replica's part of a call.

    Attributes:
        device: Where the replica is.
        inputs: Those tensors among its arguments that require a gradient.
        outputs: All tensors among its results.
        results: What it has returned.

    Args:
        device: Where the replica is.
        leaves: What stands in it for the module's parameters.
        call: What to call.
        arguments: Positional and keyword arguments.
        owns_inputs: Whether nobody else has the tensors among them.
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
        self.results: Any = None
        # Outputs whose graph is gone, and those that the backward which runs begins in.
        self._over: set[int] = set()
        self._begun: set[int] = set()
        self._call = call
        self._arguments = arguments
        self._leaves = leaves
        self._owns_inputs = owns_inputs
        # What stands for each of the inputs in the replica's graph.
        self._input_leaves: list[torch.Tensor] = []
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
        self.results = self._call(*args, **kwargs)
        map_tensors(self.outputs.append, self.results)
        self._arguments = ((), {})  # wanted no more, and their memory may be

    def ends(self, d_outputs: Gradients) -> Ends:
        """Where its backward begins, and with which gradients."""
        self._begun = {i for i, gradient in enumerate(d_outputs) if gradient is not None}
        if self._begun & self._over:
            raise RuntimeError(
                "A second backward through replicas whose first has let go of what it needs. Give "
                "the first retain_graph=True."
            )
        return [
            (output, gradient)
            for output, gradient in zip(self.outputs, d_outputs, strict=True)
            if gradient is not None and output.requires_grad
        ]

    def derivative(self, d_outputs: Gradients) -> Part:
        """A call that runs this one's backward, and has a backward itself.

        Its inputs are those of this call and those of ``d_outputs`` that require a gradient; its
        results the gradients of the parameters, and those of this call's inputs.
        """
        part = Part(self.device, self._leaves, self._differentiate, ((d_outputs,), {}))
        part.inputs[:0] = self.inputs
        part._input_leaves = self._input_leaves
        return part

    def _differentiate(self, d_outputs: Gradients) -> Gradients:
        leaves = [*self._leaves, *self._input_leaves]
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        ends = self.ends(d_outputs)
        if not ends or not wanted:
            return [None] * len(leaves)
        outputs, given = zip(*ends, strict=True)
        found = iter(
            torch.autograd.grad(outputs, wanted, given, create_graph=True, allow_unused=True)
        )
        return [next(found) if leaf.requires_grad else None for leaf in leaves]

    def forget(self) -> None:
        """Let go of the graph of those outputs in which the last backward began."""
        self._over |= self._begun
        for index in self._begun:
            self.outputs[index] = self.outputs[index].detach()

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


def run_backward(ends: Ends, keep_graph: bool) -> None:
    """Run the backward that begins in ``ends``; gradients add up in the leaves."""
    if ends:
        outputs, d_outputs = zip(*ends, strict=True)
        torch.autograd.backward(outputs, d_outputs, retain_graph=keep_graph)
