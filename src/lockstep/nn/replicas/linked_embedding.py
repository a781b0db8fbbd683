"""Embeddings whose rows depend on the lookups of all replicas.

``max_norm`` scales rows in place when they are looked up; a replica must not do that while other
replicas read the shared weight. ``scale_grad_by_freq`` divides a row's gradient by the number of
its lookups in the whole batch. In replicas such a weight is a :class:`LinkedEmbedding`.
"""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from lockstep.nn.replicas.group import Replica, this_replica
from lockstep.torch_private import DisableTorchFunctionSubclass


class LinkedEmbedding(nn.Parameter):
    """The weight of an embedding whose lookups are counted over all replicas.

    Source: ``__torch_function__`` in "Extending PyTorch", which torch calls for each function with
    such an argument.
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
            run = partial(_look_up, func) if func in _LOOKUPS else func
            return run(*args, **(kwargs or {}))


def linked_embeddings_in(parts: Sequence[nn.Module]) -> set[int]:
    """The ``id()`` of those weights in ``parts`` whose rows depend on all replicas' lookups."""
    return {
        id(part.weight)
        for part in parts
        if isinstance(part, nn.Embedding | nn.EmbeddingBag)
        and (part.max_norm is not None or part.scale_grad_by_freq)
    }


def as_linked(parameter: torch.Tensor) -> torch.Tensor:
    """Return a linked embedding with the values of ``parameter``, differentiable by it."""
    return _AsLinkedEmbedding.apply(parameter)  # type: ignore[no-untyped-call,no-any-return]


class _AsLinkedEmbedding(torch.autograd.Function):
    """Not a view of the parameter, as views have no sparse gradients."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor) -> torch.Tensor:
        return torch.Tensor._make_subclass(LinkedEmbedding, parameter.detach())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


_LOOKUPS = {each: inspect.signature(each) for each in (F.embedding, F.embedding_bag)}


def _look_up(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Look rows up as ``func`` does, with the lookups of all replicas taken into account."""
    call = _LOOKUPS[func].bind(*args, **kwargs)
    call.apply_defaults()
    given, replica = call.arguments, this_replica()
    weight, max_norm = given["weight"], given["max_norm"]
    if max_norm is None and not given["scale_grad_by_freq"]:
        return func(*args, **kwargs)
    counts = torch.bincount(given["input"].reshape(-1), minlength=len(weight))
    if replica is not None:
        # With a finish, though it changes nothing, the sum includes the replicas around these.
        counts = replica.add_up(counts, torch.clone)
    if max_norm is not None:
        arguments = weight.detach(), counts.nonzero().flatten(), max_norm, given["norm_type"]
        scale_rows = partial(torch.embedding_renorm_, *arguments)
        # Before any replica reads a row or saves the weight for its backward.
        scale_rows() if replica is None else _once_per_device(replica, weight.device, scale_rows)
    if given["scale_grad_by_freq"]:
        weight = _DividedByCounts.apply(weight, counts)  # type: ignore[no-untyped-call]
    given |= {"weight": weight, "max_norm": None, "scale_grad_by_freq": False}
    return func(*call.args, **call.kwargs)


def _once_per_device(replica: Replica, device: torch.device, do: Callable[[], object]) -> None:
    """Run ``do`` in the first replica on each device, while all others wait."""
    kinds = torch.zeros(replica.count, dtype=torch.long)
    kinds[replica.index] = kind = 1 + zlib.crc32(str(device).encode())
    first = replica.add_up(kinds).tolist().index(kind)
    try:
        if first == replica.index:
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
