"""The operators of torch's SyncBatchNorm, which has them for GPUs alone, in others' terms."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tests.simulated.control import KIND

Tensor = torch.Tensor


def _per_channel(values: Tensor, input: Tensor) -> Tensor:
    return values.view(1, -1, *[1] * (input.dim() - 2))


def _dims(input: Tensor) -> list[int]:
    return [dim for dim in range(input.dim()) if dim != 1]


def _stats(input: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    variance, mean = torch.var_mean(input, _dims(input), correction=0)
    return mean, (variance + eps).rsqrt()


def _gather_stats(
    input: Tensor,
    mean: Tensor,
    inverse: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    counts = counts.view(-1, 1)
    total = counts.sum()
    every = (mean * counts).sum(0) / total
    square = ((inverse.pow(-2) - eps + (mean - every).square()) * counts).sum(0)
    if running_mean is not None and running_var is not None:
        running_mean.lerp_(every, momentum)
        running_var.lerp_(square / (total - 1), momentum)
    return every, (square / total + eps).rsqrt()


def _elemt(
    input: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, inverse: Tensor, eps: float
) -> Tensor:
    mean, inverse, weight, bias = (_per_channel(v, input) for v in (mean, inverse, weight, bias))
    return (input - mean) * inverse * weight + bias


def _backward_reduce(
    gradient: Tensor,
    input: Tensor,
    mean: Tensor,
    inverse: Tensor,
    weight: Tensor,
    *_: bool,
) -> tuple[Tensor, ...]:
    dims = _dims(input)
    total = gradient.sum(dims)
    product = (gradient * (input - _per_channel(mean, input))).sum(dims)
    return total, product, product * inverse, total


def _backward_elemt(
    gradient: Tensor,
    input: Tensor,
    mean: Tensor,
    inverse: Tensor,
    weight: Tensor,
    total: Tensor,
    product: Tensor,
    counts: Tensor,
) -> Tensor:
    number = counts.sum()
    slope = _per_channel(inverse.square() * product / number, input)
    centered = gradient - _per_channel(total / number, input)
    centered = centered - (input - _per_channel(mean, input)) * slope
    return centered * _per_channel(inverse * weight, input)


@contextmanager
def with_torchs_batch_norm() -> Iterator[None]:
    """Let torch's SyncBatchNorm find its operators on simulated devices."""
    library = torch.library.Library("aten", "IMPL")
    for name, function in {
        "batch_norm_stats": _stats,
        "batch_norm_gather_stats_with_counts": _gather_stats,
        "batch_norm_elemt": _elemt,
        "batch_norm_backward_reduce": _backward_reduce,
        "batch_norm_backward_elemt": _backward_elemt,
    }.items():
        library.impl(name, function, {"cuda": "CUDA"}.get(KIND, "PrivateUse1"))
    try:
        yield
    finally:
        library._destroy()
