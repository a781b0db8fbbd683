"""Sparse gradients: those of ``nn.Embedding(sparse=True)``, of which few rows are computed."""

from __future__ import annotations

import torch
import torch.distributed as dist

from lockstep.comm import sum_rows
from lockstep.grad.comm_hook import CommHook, GradBucket, reduced_buffer


def reduce_sparse(
    parameter: torch.nn.Parameter,
    group: dist.ProcessGroup,
    scale: float,
    hook: CommHook | None = None,
    *,
    index: int = 0,
    is_last: bool = False,
) -> torch.Tensor:
    """Return the sum over the ranks of the gradient of ``parameter``, each times ``scale``.

    Only the rows that are present are sent. Every rank of ``group`` must call it; it blocks.

    Args:
        parameter: The parameter; its gradient may be dense, as where it is used in another way
            too, and then so is the result, or None, and then the result is sparse.
        group: The process group.
        scale: The factor, unless there is a hook.
        hook: A communication hook, to which the gradient is a bucket.
        index: The index of that bucket.
        is_last: Whether no bucket comes after it.

    Raises:
        CollectiveFailed: If another rank is lost, or times out.
        HookError: If the hook returns anything but a future of one tensor.
    """
    gradient, is_dense = parameter.grad, False
    if gradient is None:
        no_rows = torch.empty(1, 0, dtype=torch.int64, device=parameter.device)
        values = parameter.new_empty(0, *parameter.shape[1:]).detach()
        gradient = torch.sparse_coo_tensor(no_rows, values, parameter.shape, check_invariants=False)
    elif not gradient.is_sparse:
        gradient, is_dense = gradient.to_sparse(1), True
    gradient = gradient.detach()
    if hook is None:
        total = sum_rows(group, gradient.coalesce() * scale)
    else:
        bucket = GradBucket(index, gradient, [parameter], is_last=is_last)
        total = reduced_buffer(hook(bucket), gradient.numel())
    return total.to_dense() if is_dense else total
