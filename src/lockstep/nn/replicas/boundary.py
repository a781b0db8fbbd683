"""Where the replicas' graphs end and the caller's begins, so that each has a backward of its own.

Autograd runs the backward of everything that is on the CPU in one thread. So a replica gets its
inputs and parameters as leaves, and its graph is one that nobody else knows. For the caller all
replicas together are one function, whose backward runs theirs, at the same time, and adds up what
comes of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from lockstep.comm import uncompiled
from lockstep.nn.micro_batches import remember_reached
from lockstep.nn.replicas.enclosing import as_backward_of_replicas
from lockstep.nn.replicas.meeting import is_one, mark_as_one
from lockstep.nn.replicas.tensors import map_tensors
from lockstep.torch_private import _foreach_add_, _get_current_graph_task_keep_graph

Gradients = list[torch.Tensor | None]


class Call(Protocol):
    """One call of all replicas.

    Attributes:
        parameters: Those of the module that is replicated.
        inputs: Those tensors among the replicas' arguments that require a gradient.
        results: What each replica has returned, with tensors that nobody else has.
    """

    parameters: list[torch.Tensor]
    inputs: list[torch.Tensor]
    results: list[Any]

    def forward(self) -> Sequence[tuple[torch.Tensor, bool]]:
        """Call all; return the tensors in ``results``, and for each if it requires a gradient."""
        ...

    def backward(self, d_outputs: Sequence[torch.Tensor | None], *, keep_graph: bool) -> Gradients:
        """Run the backward of all; return the gradients of ``parameters`` and ``inputs``."""
        ...

    def derivative(
        self, d_outputs: Sequence[torch.Tensor | None], *, keep_graph: bool
    ) -> Gradients:
        """The same, as gradients that have a backward themselves."""
        ...


def call_replicas(call: Call) -> list[Any]:
    """What each replica has returned, with the backward of all behind it."""
    if torch.is_grad_enabled():
        tensors: Sequence[torch.Tensor]
        tensors = _Boundary.apply(call, *call.parameters, *call.inputs)  # type: ignore[no-untyped-call]
    else:
        tensors = [tensor for tensor, _ in call.forward()]
    mine = iter(tensors)

    def put_in(inner: torch.Tensor) -> torch.Tensor:
        outer = next(mine)
        if is_one(inner):
            mark_as_one(outer)
        return outer

    results, call.results = call.results, []
    return [map_tensors(put_in, result) for result in results]


@uncompiled
class _Boundary(torch.autograd.Function):
    """All replicas, as one function of the parameters and of all their inputs."""

    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs = [(output.detach(), needs) for output, needs in call.forward()]
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(output for output, needs in outputs if not needs))
        return tuple(output for output, _ in outputs)

    @staticmethod
    def backward(ctx: Any, *d_outputs: torch.Tensor | None) -> tuple[Any, ...]:
        keep_graph = _get_current_graph_task_keep_graph()
        remember_reached()
        run = ctx.call.derivative if torch.is_grad_enabled() else ctx.call.backward
        with as_backward_of_replicas():
            gradients = run(d_outputs, keep_graph=keep_graph)
        wanted = ctx.needs_input_grad[1:]
        return None, *(g if needs else None for g, needs in zip(gradients, wanted, strict=True))


def add_up(of_replicas: Sequence[Gradients], homes: Sequence[torch.device]) -> Gradients:
    """Add up each parameter's gradients, in the order of the replicas, so that bits don't vary.

    Args:
        of_replicas: For each replica the gradients of all parameters; only the first one's are
            written to or become part of what is returned.
        homes: Where each sum is to be.
    """
    first, *others = of_replicas
    total = [_at_home(g, home) for g, home in zip(first, homes, strict=True)]
    for gradients in others:
        sums: list[torch.Tensor] = []
        more: list[torch.Tensor] = []
        for index, (gradient, home) in enumerate(zip(gradients, homes, strict=True)):
            so_far, gradient = total[index], _at_home(gradient, home)
            if so_far is None and gradient is not None:
                total[index] = gradient.clone()
            elif so_far is None or gradient is None:
                continue
            elif so_far.layout is gradient.layout is torch.strided:
                sums.append(so_far)
                more.append(gradient)
            else:
                total[index] = sum_of_two(so_far, gradient)
        if sums:
            _foreach_add_(sums, more)
    return total


def sum_of_two(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """The sum of gradients of which one may be sparse, and which torch adds to dense ones only."""
    return second + first if first.is_sparse and not second.is_sparse else first + second


def _at_home(gradient: torch.Tensor | None, home: torch.device) -> torch.Tensor | None:
    if gradient is None or gradient.device == home:
        return gradient
    return gradient.to(home, non_blocking=home.type != "cpu")
