"""Sparse gradients, whose rows travel in place of a bucket."""

from __future__ import annotations

import torch
import torch.distributed as dist

from lockstep.comm import sum_rows
from lockstep.grad.comm_hook import CommHook, GradBucket, reduced_buffer
from lockstep.grad.table import GradientTable


def mean_of_rows(
    table: GradientTable, position: int, group: dist.ProcessGroup, scale: float
) -> torch.Tensor:
    """Return the sum of all ranks' gradients at ``position``, each times ``scale``.

    It is dense if this rank's gradient is.
    """
    parameter = table.parameters[position]
    total, table.row_bytes[position] = sum_rows(group, rows_of(parameter), scale)
    return _in_layout_of(parameter.grad, total)


def hooked_rows(
    hook: CommHook, parameter: torch.nn.Parameter, index: int, *, is_last: bool
) -> torch.Tensor:
    """Return what ``hook`` makes of a gradient, which it gets as the bucket ``index``, unscaled."""
    rows = rows_of(parameter)
    bucket = GradBucket(index, rows, [parameter], is_last=is_last)
    total = reduced_buffer(hook(bucket), rows.numel())
    return _in_layout_of(parameter.grad, total)


def rows_of(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Return the gradient of ``parameter`` as a sparse tensor; without rows if there is none."""
    gradient = parameter.grad
    if gradient is None:
        indices = torch.empty(1, 0, dtype=torch.int64, device=parameter.device)
        values = parameter.new_empty(0, *parameter.shape[1:]).detach()
        return torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=False)
    return (gradient if gradient.is_sparse else gradient.to_sparse(1)).detach()


def _in_layout_of(gradient: torch.Tensor | None, total: torch.Tensor) -> torch.Tensor:
    return total if gradient is None or gradient.is_sparse else total.to_dense()
