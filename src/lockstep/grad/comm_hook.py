"""Communication hooks: somebody else's way of reducing a bucket."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch.futures import Future

from lockstep.errors import HookError
from lockstep.grad.views import view_like


class GradBucket:
    """What a communication hook is given: some gradients, side by side in one buffer.

    It answers to what hooks ask of :class:`torch.distributed.GradBucket`, so torch's own hooks,
    and those written for them, take it.
    """

    def __init__(
        self,
        index: int,
        buffer: torch.Tensor,
        parameters: Sequence[torch.Tensor],
        *,
        is_last: bool,
    ) -> None:
        self._index = index
        self._buffer = buffer
        self._parameters = list(parameters)
        self._is_last = is_last

    def __repr__(self) -> str:
        return f"GradBucket({self._index}, {self._buffer.numel()} x {self._buffer.dtype})"

    def index(self) -> int:
        """Its place in the order in which buckets are reduced; 0 comes first."""
        return self._index

    def buffer(self) -> torch.Tensor:
        """The gradients, as one tensor of one dimension. What is written there stays.

        A sparse gradient, as of ``nn.Embedding(sparse=True)``, is a bucket of its own, and itself.
        """
        return self._buffer

    def gradients(self) -> list[torch.Tensor]:
        """The gradients, each a view of the buffer, in the shape of its parameter."""
        if self._buffer.is_sparse:
            return [self._buffer]
        starts = accumulate((parameter.numel() for parameter in self._parameters), initial=0)
        return [
            view_like(self._buffer, start, parameter)
            for start, parameter in zip(starts, self._parameters, strict=False)
        ]

    def parameters(self) -> list[torch.Tensor]:
        """The parameters, in the order of their gradients."""
        return list(self._parameters)

    def is_last(self) -> bool:
        """Whether this is the last bucket of the backward."""
        return self._is_last

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Let :meth:`buffer` return ``buffer``, of as many elements, from now on."""
        if buffer.numel() != self._buffer.numel():
            raise ValueError(
                f"set_buffer() was given {buffer.numel()} elements, but this bucket has "
                f"{self._buffer.numel()}."
            )
        self._buffer = buffer


class CommHook(NamedTuple):
    """A hook, and what it keeps between calls.

    Attributes:
        state: Passed to each call.
        function: Takes ``state`` and a :class:`GradBucket`, whose gradients are this rank's own,
            and returns a future of what they are to be, as one tensor: as a rule, the mean over
            the ranks. It is called once for each bucket, in the same order on every rank.
    """

    state: Any
    function: Callable[[Any, GradBucket], Future[torch.Tensor]]

    def __call__(self, bucket: GradBucket) -> Future[torch.Tensor]:
        """Start reducing ``bucket``."""
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
        """What to call it in messages and logs."""
        return getattr(self.function, "__qualname__", repr(self.function))


def reduced_buffer(future: Future[torch.Tensor], numel: int) -> torch.Tensor:
    """Wait for what a hook has made of a bucket of so many elements."""
    value: Any = future.wait()
    # What a Work's future holds is the list of the tensors that its collective was given.
    while isinstance(value, list | tuple) and len(value) == 1:
        value = value[0]
    if not isinstance(value, torch.Tensor):
        raise HookError(
            f"The future of the communication hook holds a {type(value).__name__}, but must hold "
            "one tensor: the reduced buffer of the bucket."
        )
    if value.numel() != numel:
        raise HookError(
            f"The future of the communication hook holds {value.numel()} elements, but the bucket "
            f"has {numel}."
        )
    return value
