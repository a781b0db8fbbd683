"""Gradients of which a backward computes some rows only: those of ``nn.Embedding(sparse=True)``."""

from __future__ import annotations

import torch
import torch.distributed as dist

from lockstep.comm import sum_rows


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

    def reduce(self, group: dist.ProcessGroup, share: float) -> None:
        """Add it up over the ranks, each rank's times ``share``. It blocks.

        Raises:
            CollectiveFailed: If another rank is lost, or doesn't come in time.
        """
        gradient = self._parameter.grad
        if gradient is None:
            gradient = _nothing_of(self._parameter)
        elif not gradient.is_sparse:
            gradient = gradient.to_sparse(1)  # of a weight that is used in another way too
        self._sum = sum_rows(group, gradient.detach().coalesce() * share)

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
