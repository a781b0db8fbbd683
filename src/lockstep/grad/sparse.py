"""Gradients of which a backward computes some rows only: those of ``nn.Embedding(sparse=True)``."""

from __future__ import annotations

import torch
import torch.distributed as dist

from lockstep.comm import sum_rows
from lockstep.grad.comm_hook import CommHook, GradBucket, reduced_buffer


class SparseGradient:
    """The gradient of one parameter, of which nothing travels but the rows that are there.

    It travels by itself, when the backward is over: what is looked up comes first in most models,
    so that its gradient comes last.

    Args:
        parameter: What it is the gradient of.
    """

    def __init__(self, parameter: torch.nn.Parameter) -> None:
        self._parameter = parameter
        self._sum: torch.Tensor | None = None

    @property
    def is_there(self) -> bool:
        """Whether this rank has it."""
        return self._parameter.grad is not None

    def reduce(self, group: dist.ProcessGroup, share: float) -> None:
        """Add it up over the ranks, each rank's times ``share``. It blocks.

        Raises:
            CollectiveFailed: If another rank is lost, or doesn't come in time.
        """
        self._sum = sum_rows(group, self._own().detach().coalesce() * share)

    def _own(self) -> torch.Tensor:
        """This rank's part of it, sparse."""
        gradient = self._parameter.grad
        if gradient is None:
            return _nothing_of(self._parameter)
        # It is dense if the weight is used in another way too.
        return gradient if gradient.is_sparse else gradient.to_sparse(1)

    def reduce_through(self, hook: CommHook, index: int, *, is_last: bool) -> None:
        """Let ``hook`` reduce it, as a bucket of its own. It blocks.

        Raises:
            TypeError: If the hook returns something else than a future of one tensor.
        """
        gradient = self._own().detach()
        bucket = GradBucket(index, gradient, [self._parameter], is_last=is_last)
        self._sum = reduced_buffer(hook(bucket), gradient.numel())

    def drop(self) -> None:
        """The gradient, and the sum, are lost."""
        self._parameter.grad = self._sum = None

    def adopt(self) -> None:
        """Make the sum the gradient: a dense one where it was dense."""
        gradient, total, self._sum = self._parameter.grad, self._sum, None
        if total is not None:
            is_dense = gradient is not None and not gradient.is_sparse
            self._parameter.grad = total.to_dense() if is_dense else total


def _nothing_of(parameter: torch.Tensor) -> torch.Tensor:
    places = torch.empty(1, 0, dtype=torch.int64, device=parameter.device)
    rows = parameter.new_empty(0, *parameter.shape[1:]).detach()
    return torch.sparse_coo_tensor(places, rows, parameter.shape, check_invariants=False)
