"""Embeddings whose rows depend on the lookups of all replicas.

``max_norm`` scales the rows that are looked up, in place: replicas that share a weight must not do
so while others read it. ``scale_grad_by_freq`` divides a row's gradient by the number of its
lookups in the whole batch. In replicas such a weight is of a class that sees to both.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from lockstep.nn.replicas.group import Replica, this_replica
from lockstep.torch_private import DisableTorchFunctionSubclass


class LinkedEmbedding(nn.Parameter):
    """The weight of an embedding whose lookups are counted over all replicas.

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


def linked_embeddings_in(parts: Sequence[nn.Module]) -> set[int]:
    """The ``id()`` of those weights in ``parts`` whose rows depend on all replicas' lookups."""
    return {
        id(part.weight)
        for part in parts
        if isinstance(part, nn.Embedding | nn.EmbeddingBag)
        and (part.max_norm is not None or part.scale_grad_by_freq)
    }


def _identity(counts: torch.Tensor) -> torch.Tensor:
    return counts


def leaf_as_linked(leaf: torch.Tensor) -> torch.Tensor:
    """A linked embedding that is a leaf and shares the memory of ``leaf``."""
    weight: torch.Tensor = torch.Tensor._make_subclass(
        LinkedEmbedding, leaf.detach(), leaf.requires_grad
    )
    return weight


def as_linked(parameter: torch.Tensor) -> torch.Tensor:
    """A linked embedding through which gradients flow back to ``parameter``."""
    linked: torch.Tensor = _AsLinkedEmbedding.apply(parameter)  # type: ignore[no-untyped-call]
    return linked


class _AsLinkedEmbedding(torch.autograd.Function):
    """Not a view of the parameter, as views have no sparse gradients."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor) -> torch.Tensor:
        return torch.Tensor._make_subclass(LinkedEmbedding, parameter.detach())

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
    weight: torch.Tensor,
    max_norm: float | None,
    norm_type: float,
    scale_grad_by_freq: bool,
) -> torch.Tensor:
    """The weight, for a lookup of these rows without ``max_norm`` and ``scale_grad_by_freq``."""
    if max_norm is None and not scale_grad_by_freq:
        return weight

    counts, replica = torch.bincount(rows.reshape(-1), minlength=len(weight)), this_replica()
    if replica is not None:
        counts = replica.add_up(counts, _identity)

    def scale_rows() -> None:
        assert max_norm is not None
        looked_up = counts.nonzero().flatten()
        torch.embedding_renorm_(weight.detach(), looked_up, max_norm, norm_type)

    if max_norm is not None and replica is None:
        scale_rows()
    elif max_norm is not None and replica is not None:
        # No replica may read a row, or save the weight for its backward, before.
        _once_per_device(replica, weight.device, scale_rows)
    if not scale_grad_by_freq:
        return weight
    divided: torch.Tensor = _DividedByCounts.apply(weight, counts)  # type: ignore[no-untyped-call]
    return divided


def _once_per_device(replica: Replica, device: torch.device, do: Callable[[], None]) -> None:
    """Let the first replica on each device ``do`` something, while all others wait."""
    kind = 1 + zlib.crc32(str(device).encode())
    kinds = torch.zeros(replica.count, dtype=torch.long)
    kinds[replica.index] = kind
    on_this_device = replica.add_up(kinds).eq(kind)
    try:
        if int(on_this_device.int().argmax()) == replica.index:
            do()
    finally:
        replica.add_up(torch.zeros(0))


class _DividedByCounts(torch.autograd.Function):
    """The weight; the gradient of each row is divided by the number of its lookups."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(counts)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (counts,) = ctx.saved_tensors
        return gradient / counts.clamp(min=1).unsqueeze(1), None
