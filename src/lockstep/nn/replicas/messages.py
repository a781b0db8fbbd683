"""What the caller and a replica's process say to each other.

The caller speaks, and the process answers once each time: with ``Returned``, ``Derived``, a list of
buffers, None or an ``Error``. In between it may ask for something: a sum over all replicas, or what
only the caller can tell.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import cloudpickle
import torch
from torch import nn

from lockstep.nn.replicas.modes import Modes


class Tensors(NamedTuple):
    """What the tensors of the module are that comes next.

    Attributes:
        parameters: The parameters, a list: the caller's memory.
        gradients: A list of memory for the gradient of each.
        flags: A list of memory to tell in which of them are there.
        are_parameters: Which of them are of class Parameter.
        are_tables: Which of them all replicas look up together.
        buffers: The values of the buffers.
    """

    parameters: Any
    gradients: Any
    flags: Any
    are_parameters: list[bool]
    are_tables: list[bool]
    buffers: list[torch.Tensor]


class Module(NamedTuple):
    """The module, which refers to tensors that are known."""

    module: nn.Module


class Call(NamedTuple):
    """A call of a method.

    Attributes:
        number: Which call it is, for its backward.
        method: What to call.
        arguments: Positional and keyword arguments.
        require_grad: Which tensors among them, in their order, require a gradient.
        modes: Those of the caller.
        default_dtype: That of the caller.
        training: Which parts of the module are in training mode.
        trained: Which parameters require a gradient.
        parameters: Which parameters have changed, if those of this replica are copies.
        buffers: Those that have changed, by index.
        dropped: Calls of which no backward will come.
        num_parts: How many replicas are called.
        num_around: How many replicas there are of what calls them.
    """

    number: int
    method: str
    arguments: tuple[Any, Any]
    require_grad: list[bool]
    modes: Modes
    default_dtype: torch.dtype
    training: list[bool]
    trained: list[bool]
    parameters: list[int]
    buffers: dict[int, torch.Tensor]
    dropped: list[int]
    num_parts: int
    num_around: int


class Returned(NamedTuple):
    """What came of a call.

    Attributes:
        results: What the method has returned.
        require_grad: Which tensors among it, in their order, require a gradient.
        are_one: Which of them are scalars that all replicas have alike.
        changed: Which buffers the call has changed.
    """

    results: Any
    require_grad: list[bool]
    are_one: list[bool]
    changed: list[int]


class Buffers(NamedTuple):
    """The caller wants to have those buffers, by index, as the last call has left them."""

    indices: list[int]


class Backward(NamedTuple):
    """The backward of a call.

    Attributes:
        number: Of which call.
        d_outputs: The gradient with respect to each tensor that it returned, or None.
        keep_graph: Whether another one may come.
    """

    number: int
    d_outputs: list[torch.Tensor | None]
    keep_graph: bool


class Derived(NamedTuple):
    """What came of a backward.

    Attributes:
        in_place: Which parameters have their gradient in the memory for gradients, not 0.
        others: Those that don't lie there, as they are sparse or a second part, by index.
        of_inputs: Those with respect to the arguments that require one.
    """

    in_place: bytes
    others: dict[int, torch.Tensor]
    of_inputs: list[torch.Tensor | None]


class Sum(NamedTuple):
    """A replica asks for a sum over all replicas.

    Attributes:
        own: What it has to add.
        finish: What makes the answer of the sum, if anything.
    """

    own: torch.Tensor
    finish: Callable[[torch.Tensor], torch.Tensor] | None


class Ask(NamedTuple):
    """A replica asks what the caller returns for ``function(*arguments)``."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]


class Error(NamedTuple):
    """What a process has raised.

    Attributes:
        error: The exception, pickled.
        traceback: Its traceback, in words; empty if it tells nothing.
    """

    error: bytes
    traceback: str


def as_error(error: Exception) -> Error:
    """What tells the other process of it."""
    text = "".join(traceback.format_exception(error)).rstrip()
    try:
        pickled = cloudpickle.dumps(error)
        pickle.loads(pickled)
    except Exception:
        pickled = pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
    return Error(pickled, text)


def as_exception(answer: Error) -> BaseException:
    """What the other process has raised."""
    error: BaseException = pickle.loads(answer.error)
    if answer.traceback:
        error.add_note(f"In its process:\n{answer.traceback}")
    return error
