"""The messages between the caller and a replica's process.

The caller sends a ``Request``, and the process answers it with the method's result or an ``Error``.
Before, it may send a ``Question``, which the caller answers likewise.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import cloudpickle
import torch

from lockstep.nn.replicas.worker_threads import Modes


class Request(NamedTuple):
    """A call of one of the methods of :class:`Worker`."""

    method: str
    arguments: tuple[Any, ...]


class Call(NamedTuple):
    """A call of a method of the module.

    Attributes:
        number: The number of the call, by which its backward refers to it.
        method: The name of the method.
        arguments: Its positional and keyword arguments.
        modes: The caller's.
        default_dtype: The caller's.
        training: For each part of the module whether it is in training mode.
        trained: For each parameter whether it requires a gradient.
        parameters: The indices of parameters that have changed, if the process has copies.
        buffers: The buffers that have changed, by index.
        dropped: The numbers of calls of which no backward will come.
        num_called: The number of replicas that are called.
        num_around: The number of replicas of the caller.
    """

    number: int
    method: str
    arguments: tuple[Any, Any]
    modes: Modes
    default_dtype: torch.dtype
    training: list[bool]
    trained: list[bool]
    parameters: list[int]
    buffers: dict[int, torch.Tensor]
    dropped: list[int]
    num_called: int
    num_around: int


class Returned(NamedTuple):
    """The results of a call, and the indices of the buffers that it has changed."""

    results: Any
    changed: list[int]


class Derived(NamedTuple):
    """The gradients of a backward.

    Attributes:
        in_place: For each parameter whether its gradient is in the memory for gradients.
        others: By index those that aren't, as they are sparse or a second part.
        of_inputs: Those with respect to the arguments that require one.
    """

    in_place: bytes
    others: dict[int, torch.Tensor]
    of_inputs: list[torch.Tensor | None]


class Question(NamedTuple):
    """A request for the caller's ``function(*arguments)``."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]


class Error(NamedTuple):
    """An exception, pickled, and its traceback in words, which may be empty."""

    error: bytes
    traceback: str


def as_error(error: Exception, *, with_traceback: bool = True) -> Error:
    """The message that tells the other process of an exception."""
    text = "".join(traceback.format_exception(error)).rstrip() if with_traceback else ""
    try:
        pickled = cloudpickle.dumps(error)
        pickle.loads(pickled)
    except Exception:
        pickled = pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
    return Error(pickled, text)


def as_exception(answer: Error) -> BaseException:
    """The exception that the other process has raised."""
    error: BaseException = pickle.loads(answer.error)
    if answer.traceback:
        error.add_note(f"In its process:\n{answer.traceback}")
    return error
