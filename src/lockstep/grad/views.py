"""Gradients as views of a buffer."""

from __future__ import annotations

import torch


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
