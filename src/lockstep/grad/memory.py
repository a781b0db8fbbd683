"""The memory of a bucket's gradients, and who else has it.

Note [Gradients that the program holds]: in one process a gradient that the program keeps over
``zero_grad()`` stays as it is, and one that is still in ``parameter.grad`` is the tensor that
autograd adds to. Here both are views of one memory, which every backward uses. So

- if the program has any of the former when a backward begins, the bucket takes other memory. What
  is still a parameter's gradient comes with it, as the same tensor;
- a gradient that a backward doesn't touch gets memory of its own, as the same tensor;
- a tensor of the program's own that autograd has added to gets a copy of the mean.

Holders are told by the number of references to a view and to its memory, which takes 20 ns a
gradient. Shown by tests/nn/test_kept_gradients.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from sys import getrefcount
from typing import Any, NamedTuple

import torch

from lockstep.torch_private import storage_use_count

# Parameters and pending gradients begin at multiples of this number of elements: at whole cache
# lines.
ALIGNMENT = 64
# The gradient that autograd accumulates to; a DeferredParameter has a property of this name.
_slot: Any = torch.Tensor.grad
gradient_of: Callable[[torch.Tensor], torch.Tensor | None] = _slot.__get__
set_gradient: Callable[[torch.Tensor, torch.Tensor | None], None] = _slot.__set__
_is_view = torch.Tensor._is_view
# What getrefcount() returns, through map(), of a tensor in a list that nobody else holds; and of
# one that is a parameter's gradient besides.
_IN_A_LIST, _IN_A_LIST_AND_GRADIENT = 2, 3


def gradient_dtype(parameter: torch.Tensor) -> torch.dtype:
    """Return the dtype of a parameter's gradient: its own, unless it has a ``grad_dtype``."""
    dtype: torch.dtype | None = (
        getattr(parameter, "grad_dtype", None) if parameter.is_leaf else None
    )
    return parameter.dtype if dtype is None else dtype


def aligned(numel: int) -> int:
    """Return the number of elements that a tensor of ``numel`` elements takes if it is aligned."""
    return -(-max(numel, 1) // ALIGNMENT) * ALIGNMENT


class Memory(NamedTuple):
    """A buffer with the gradients of a bucket and, behind them, the facts."""

    buffer: torch.Tensor
    gradients: torch.Tensor  # of one dimension
    tail: torch.Tensor  # the facts; elsewhere if a communication hook takes the buffer
    views: list[torch.Tensor]  # of the gradients, each in the shape of its parameter
    pointers: list[int]  # the addresses of the views when they were made
    storage: torch.UntypedStorage  # of the buffer
    num_uses: int  # how many tensors use the storage if the program has none of its own

    @classmethod
    def of(
        cls,
        buffer: torch.Tensor,
        gradients: torch.Tensor,
        tail: torch.Tensor,
        views: list[torch.Tensor],
    ) -> Memory:
        """Return the memory of ``buffer``, which nobody else uses yet."""
        storage = buffer.untyped_storage()
        pointers = [view.data_ptr() for view in views]
        num_uses = storage_use_count(storage._cdata)
        return cls(buffer, gradients, tail, views, pointers, storage, num_uses)

    def is_free(self) -> bool:
        """Whether only the bucket uses it: no view is a parameter's gradient, or held otherwise."""
        return not self._has_views_of_views() and (
            max(map(getrefcount, self.views), default=0) <= _IN_A_LIST
        )

    def is_held(self, gradients: Sequence[torch.Tensor | None]) -> bool:
        """Whether somebody else holds a view that is none of ``gradients``, or a view of a view."""
        counts = [*map(getrefcount, self.views)]  # before zip() holds one, too
        return self._has_views_of_views() or any(
            gradient is not view and count > _IN_A_LIST
            for gradient, view, count in zip(gradients, self.views, counts, strict=True)
        )

    def _has_views_of_views(self) -> bool:
        return storage_use_count(self.storage._cdata) != self.num_uses


def is_any_held(gradients: Sequence[torch.Tensor]) -> bool:
    """Whether one of ``gradients``, of parameters, is held by others, or a part of other memory.

    They are dense, and in this sequence alone.
    """
    counts = map(getrefcount, gradients)
    return max(counts, default=0) > _IN_A_LIST_AND_GRADIENT or any(map(_is_view, gradients))


def which_are_held(gradients: Sequence[torch.Tensor | None]) -> list[bool]:
    """Return for each of ``gradients`` whether :func:`is_any_held`; sparse ones aren't told."""
    return [
        gradient is not None
        and gradient.layout is torch.strided
        and not gradient.requires_grad  # which has a graph that others may hold
        and (count > _IN_A_LIST_AND_GRADIENT or _is_view(gradient))
        for gradient, count in zip(gradients, [*map(getrefcount, gradients)], strict=True)
    ]
