"""Gradients as views of a buffer."""

from __future__ import annotations

import torch


def gradient_dtype(parameter: torch.Tensor) -> torch.dtype:
    """The dtype of the gradient of ``parameter``: its own, unless it has a ``grad_dtype``."""
    dtype: torch.dtype | None = (
        getattr(parameter, "grad_dtype", None) if parameter.is_leaf else None
    )
    return parameter.dtype if dtype is None else dtype


def view_like(buffer: torch.Tensor, start: int, parameter: torch.Tensor) -> torch.Tensor:
    """The elements of ``buffer`` from ``start`` on, in the shape of ``parameter``.

    And, if that is dense, in its memory order: optimizers and autograd are fastest if a gradient
    lies in memory as its parameter does (say, channels last).
    """
    # As data: autograd refuses detach_() on what it knows to be a view.
    if torch.ops.aten.is_non_overlapping_and_dense(parameter):
        # The buffer may itself be a part of something.
        offset = buffer.storage_offset() + start
        return buffer.as_strided(parameter.shape, parameter.stride(), offset).data
    return buffer[start : start + parameter.numel()].view(parameter.shape).data
