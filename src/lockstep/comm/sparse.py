"""Sums of sparse tensors over ranks, of which only the elements that are there travel."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from operator import add

import torch
from torch import Tensor


def sum_sparse(all_gather: Callable[[Tensor], list[Tensor]], mine: Tensor) -> Tensor:
    """Return the sum of the ranks' sparse tensors, taken in rank order, so that bits are equal.

    The group need not be able to sum sparse tensors, which NCCL's can't. All ranks must call it;
    it blocks.

    Args:
        all_gather: Returns every rank's tensor, of one shape and dtype, in rank order.
        mine: This rank's tensor: coalesced, in COO layout. Ranks may hold different elements, and
            different numbers of them.
    """
    indices, values = mine.indices().T, mine.values()
    counts = [int(n) for n in all_gather(torch.tensor([len(values)], device=values.device))]
    if len(counts) == 1 or not max(counts):
        return mine
    padding = max(counts) - len(values)
    all_indices, all_values = (
        all_gather(torch.cat([own, own.new_zeros(padding, *own.shape[1:])]))
        for own in (indices, values)
    )
    parts = (
        torch.sparse_coo_tensor(
            i[:n].T, v[:n], mine.shape, is_coalesced=True, check_invariants=False
        )
        for i, v, n in zip(all_indices, all_values, counts, strict=True)
    )
    # Two at a time: torch doesn't say in which order it sums more than two values of one element.
    return reduce(add, parts).coalesce()
