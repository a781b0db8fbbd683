"""Communication hooks: functions of the program that reduce buckets instead of an all-reduce."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch.futures import Future

from lockstep.errors import HookError


class GradBucket:
    """The argument of a communication hook: gradients, side by side in one buffer.

    It has the methods of :class:`torch.distributed.GradBucket` that hooks call. So torch's own
    hooks, and hooks written for torch, accept it.
    """

    def __init__(
        self, index: int, buffer: torch.Tensor, parameters: Sequence[torch.Tensor], *, is_last: bool
    ) -> None:
        self._index, self._buffer, self._is_last = index, buffer, is_last
        self._parameters = list(parameters)

    def __repr__(self) -> str:
        return f"GradBucket({self._index}, {self._buffer.numel()} x {self._buffer.dtype})"

    def index(self) -> int:
        """Return its position in the order in which buckets are reduced; 0 comes first."""
        return self._index

    def buffer(self) -> torch.Tensor:
        """Return the gradients as a tensor of one dimension, which the hook may write to.

        A sparse gradient, as of ``nn.Embedding(sparse=True)``, has a bucket of its own, and is the
        buffer of that.
        """
        return self._buffer

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradients, each a view of the buffer, in the shape of its parameter."""
        if self._buffer.is_sparse:
            return [self._buffer]
        starts = accumulate((parameter.numel() for parameter in self._parameters), initial=0)
        return [
            view_like(self._buffer, start, parameter)
            for start, parameter in zip(starts, self._parameters, strict=False)
        ]

    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters, in the order of their gradients."""
        return list(self._parameters)

    def is_last(self) -> bool:
        """Return whether this is the last bucket of the backward."""
        return self._is_last

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Let :meth:`buffer` return ``buffer`` from now on; it has the same number of elements."""
        if buffer.numel() != self._buffer.numel():
            raise ValueError(
                f"set_buffer() was given {buffer.numel()} elements, but this bucket has "
                f"{self._buffer.numel()}."
            )
        self._buffer = buffer


class CommHook(NamedTuple):
    """A communication hook with its state.

    Attributes:
        state: The first argument of each call.
        function: Takes ``state`` and a :class:`GradBucket` of this rank's own gradients, and
            returns a future of the reduced ones, as one tensor: as a rule, the mean over the
            ranks. It is called once for each bucket, in the same order on every rank.
    """

    state: Any
    function: Callable[[Any, GradBucket], Future[torch.Tensor]]

    def __call__(self, bucket: GradBucket) -> Future[torch.Tensor]:
        """Start the reduction of ``bucket``."""
        future = self.function(self.state, bucket)
        if not hasattr(future, "wait"):
            raise HookError(
                f"The communication hook {self.name} returned a {type(future).__name__}, but must "
                "return a torch.futures.Future of the reduced buffer, such as "
                "work.get_future() or that of an async_op=True collective."
            )
        return future

    @property
    def name(self) -> str:
        """Its name in messages and logs."""
        return getattr(self.function, "__qualname__", repr(self.function))


def reduced_buffer(future: Future[torch.Tensor], numel: int) -> torch.Tensor:
    """Wait for the result of a hook: the reduced buffer, of ``numel`` elements."""
    value: Any = future.wait()
    # The future of a Work holds the list of its collective's tensors.
    while isinstance(value, list | tuple) and len(value) == 1:
        value = value[0]
    holds = "The future of the communication hook holds"
    if not isinstance(value, torch.Tensor):
        raise HookError(
            f"{holds} a {type(value).__name__}, but must hold one tensor: the reduced buffer of "
            "the bucket."
        )
    if value.numel() != numel:
        raise HookError(f"{holds} {value.numel()} elements, but the bucket has {numel}.")
    return value


def view_like(buffer: torch.Tensor, start: int, parameter: torch.Tensor) -> torch.Tensor:
    """Return the elements of ``buffer`` from ``start`` on, in the shape of ``parameter``.

    The view has the strides of a dense parameter (channels last, say): optimizers and autograd are
    fastest if both have the same.
    """
    # As data: autograd refuses detach_() on tensors that it knows to be views.
    if torch.ops.aten.is_non_overlapping_and_dense(parameter):
        # The buffer may itself be a view.
        offset = buffer.storage_offset() + start
        return buffer.as_strided(parameter.shape, parameter.stride(), offset).data
    return buffer[start : start + parameter.numel()].view(parameter.shape).data
