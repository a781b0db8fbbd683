"""Dtypes to compute and to reduce in, other than those of the parameters."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch.futures import Future

from lockstep.arguments import check_type
from lockstep.comm import mean_divisor
from lockstep.grad import GradBucket


@runtime_checkable
class MixedPrecision(Protocol):
    """The interface of torch's ``_MixedPrecision``; None leaves a dtype as it is.

    Attributes:
        param_dtype: The dtype of parameters and floating-point inputs in forward.
        reduce_dtype: The dtype in which gradients are reduced.
        buffer_dtype: The dtype of floating-point buffers.
    """

    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    buffer_dtype: torch.dtype | None


def check_precision(precision: MixedPrecision | None) -> None:
    """Raise TypeError, naming the argument, unless ``precision`` is None or has three dtypes."""
    wanted = "an object with a param_dtype, a reduce_dtype and a buffer_dtype"
    check_type("mixed_precision", precision, MixedPrecision | None, wanted)
    for name in ("param_dtype", "reduce_dtype", "buffer_dtype"):
        dtype = getattr(precision, name, None)
        check_type(f"mixed_precision.{name}", dtype, torch.dtype | None, "a torch.dtype or None")


def reduce_in_dtype(
    state: tuple[dist.ProcessGroup, torch.dtype], bucket: GradBucket
) -> Future[torch.Tensor]:
    """A communication hook that computes the mean over a group in a given dtype."""
    group, dtype = state
    narrow = bucket.buffer().div(mean_divisor(group)).to(dtype)
    return group.allreduce([narrow], dist.AllreduceOptions()).get_future()
