"""Tables of embeddings, what becomes of whose rows depends on what all replicas look up.

``max_norm`` scales the rows that are looked up, in place: replicas that share a table must not do
so while others read it. ``scale_grad_by_freq`` divides a row's gradient by how often it is looked
up, in the whole batch. In replicas such a table is of a class that sees to both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from lockstep.nn.replicas.meeting import this_seat
from lockstep.torch_private import DisableTorchFunctionSubclass


class Table(nn.Parameter):
    """A parameter that is looked up together with the other replicas.

    Source: ``__torch_function__`` of "Extending PyTorch", which is called for each of torch's
    functions that is given one.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        with DisableTorchFunctionSubclass():
            return _TOGETHER.get(func, func)(*args, **(kwargs or {}))


def tables_in(parts: Sequence[nn.Module]) -> set[int]:
    """The ``id()`` of those parameters of ``parts`` that replicas have to look up together."""
    return {
        id(part.weight)
        for part in parts
        if isinstance(part, nn.Embedding | nn.EmbeddingBag)
        and (part.max_norm is not None or part.scale_grad_by_freq)
    }


def _as_it_is(counts: torch.Tensor) -> torch.Tensor:
    return counts


def leaf_as_table(leaf: torch.Tensor) -> torch.Tensor:
    """A leaf, as a table that shares its memory."""
    table: torch.Tensor = torch.Tensor._make_subclass(Table, leaf.detach(), leaf.requires_grad)
    return table


def as_table(parameter: torch.Tensor) -> torch.Tensor:
    """A parameter, as a table through which gradients flow back to it."""
    table: torch.Tensor = _AsTable.apply(parameter)  # type: ignore[no-untyped-call]
    return table


class _AsTable(torch.autograd.Function):
    """No view of it, as those have no sparse gradients."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor) -> torch.Tensor:
        return torch.Tensor._make_subclass(Table, parameter.detach())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def _embedding(
    input: torch.Tensor,
    weight: torch.Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> torch.Tensor:
    weight = _looked_up_by_all(input, weight, max_norm, norm_type, scale_grad_by_freq)
    return F.embedding(input, weight, padding_idx, sparse=sparse)


def _embedding_bag(
    input: torch.Tensor,
    weight: torch.Tensor,
    offsets: torch.Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    *others: Any,
    **named: Any,
) -> torch.Tensor:
    weight = _looked_up_by_all(input, weight, max_norm, norm_type, scale_grad_by_freq)
    return F.embedding_bag(input, weight, offsets, None, norm_type, False, *others, **named)


_TOGETHER: dict[Callable[..., Any], Callable[..., Any]] = {
    F.embedding: _embedding,
    F.embedding_bag: _embedding_bag,
}


def _looked_up_by_all(
    rows: torch.Tensor,
    table: torch.Tensor,
    max_norm: float | None,
    norm_type: float,
    scale_grad_by_freq: bool,
) -> torch.Tensor:
    """The table, for a lookup of these rows that needs no more than to look them up."""
    if max_norm is None and not scale_grad_by_freq:
        return table

    counts, seat = torch.bincount(rows.reshape(-1), minlength=len(table)), this_seat()
    if seat is not None:
        counts = seat.meeting.add_up(seat.replica, counts, _as_it_is)

    def scale_rows() -> None:
        assert max_norm is not None
        looked_up = counts.nonzero().flatten()
        torch.embedding_renorm_(table.detach(), looked_up, max_norm, norm_type)

    if max_norm is not None and seat is None:
        scale_rows()
    elif max_norm is not None and seat is not None:
        # None may read a row, or save the table for its backward, before.
        seat.meeting.once(seat.replica, table.device, scale_rows)
    if not scale_grad_by_freq:
        return table
    divided: torch.Tensor = _DividedByCounts.apply(table, counts)  # type: ignore[no-untyped-call]
    return divided


class _DividedByCounts(torch.autograd.Function):
    """The table, of which each row's gradient is divided by how often it was looked up."""

    @staticmethod
    def forward(ctx: Any, table: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(counts)
        return table.view_as(table)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (counts,) = ctx.saved_tensors
        return gradient / counts.clamp(min=1).unsqueeze(1), None
