"""What autograd tells of the backward that is running."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import get_gradient_edge

from lockstep.torch_private import (
    _current_autograd_node,
    _current_graph_task_id,
    _will_engine_execute_node,
)


def is_reached(parameter: torch.Tensor) -> bool:
    """Return whether the backward that is running will add to the gradient of ``parameter``.

    It can't see into the segments of reentrant checkpoints, where it may wrongly return False.
    """
    # The node is not kept: as long as it lives, autograd expects the shape that it was made with,
    # and a parameter that has changed fails inside of autograd, without its name.
    if not parameter.requires_grad:
        return False
    try:
        return _will_engine_execute_node(get_gradient_edge(parameter).node)
    except RuntimeError:  # in autograd.grad() of a leaf: no gradient is accumulated
        return False


def is_any_reached(parameters: Sequence[nn.Parameter]) -> bool:
    """Return whether :func:`is_reached` is true of any; asking at once takes a quarter."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained or is_reached(trained[0]):
        return bool(trained)
    with torch.enable_grad():
        uses: torch.Tensor = _UsesAll.apply(*trained)  # type: ignore[no-untyped-call]
    assert uses.grad_fn is not None
    try:
        return any(
            _will_engine_execute_node(node)  # type: ignore[arg-type]
            for node, _ in uses.grad_fn.next_functions
        )
    except RuntimeError:  # as above
        return False


class _UsesAll(torch.autograd.Function):
    """Its node is followed by those that accumulate the parameters' gradients; it is never run."""

    @staticmethod
    def forward(ctx: object, *parameters: torch.Tensor) -> torch.Tensor:
        return parameters[0].new_empty(())


def is_compiled_backward() -> bool:
    """Return whether the running backward is one of compiled autograd, which runs no nodes."""
    is_running = _current_graph_task_id() != -1
    return is_running and _current_autograd_node() is None


def outermost_running_node() -> BackwardCFunction | None:
    """Return the node whose own backward runs the current one; None if there is no such node.

    A reentrant checkpoint is one, and so is every other autograd.Function that calls backward()
    in its backward(). Autograd doesn't tell, but they are on the stack of this thread: their
    first argument is the node.
    """
    node = None
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        code = frame.f_code
        if code.co_name == "backward" and code.co_argcount:
            first = frame.f_locals.get(code.co_varnames[0])
            if isinstance(first, BackwardCFunction):
                node = first
        frame = frame.f_back
    return node


# While a replica's backward runs: the number of its caller's backward, which it is a part of.
_task: ContextVar[int | None] = ContextVar("lockstep_task", default=None)


@contextmanager
def as_backward_of_replicas() -> Iterator[None]:
    """Run replicas' backward as a part of the one that runs in this thread."""
    token = _task.set(current_task())
    try:
        yield
    finally:
        _task.reset(token)


def is_backward_of_replicas() -> bool:
    """Whether a replica's backward runs in this thread."""
    return _task.get() is not None


def current_task() -> int:
    """Autograd's number for the backward that is running: in replicas for the caller's."""
    task = _task.get()
    return _current_graph_task_id() if task is None else task
