"""Training in low precision on parameters that stay in full precision."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call
from torch.futures import Future

from lockstep.arguments import check_type
from lockstep.comm import mean_divisor
from lockstep.grad import CommHook, GradBucket
from lockstep.torch_private import tree_map_only


@runtime_checkable
class MixedPrecision(Protocol):
    """The interface of torch's ``_MixedPrecision``; None leaves a dtype as it is.

    Attributes:
        param_dtype: Of parameters and floating-point inputs in forward.
        reduce_dtype: Of gradients on their way between ranks.
        buffer_dtype: Of floating-point buffers.
    """

    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    buffer_dtype: torch.dtype | None


def check_precision(precision: MixedPrecision | None) -> None:
    """Raise TypeError unless ``precision`` is None or has three dtypes."""
    wanted = "an object with a param_dtype, a reduce_dtype and a buffer_dtype"
    check_type("mixed_precision", precision, MixedPrecision | None, wanted)
    for name in ("param_dtype", "reduce_dtype", "buffer_dtype"):
        dtype = getattr(precision, name, None)
        check_type(f"mixed_precision.{name}", dtype, torch.dtype | None, "a torch.dtype or None")


def call_in_precision(
    module: nn.Module,
    dtype: torch.dtype,
    ignored: Collection[str],
    inputs: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Call ``module`` with its parameters and inputs cast to ``dtype``.

    Autograd records the casts, so the parameters get gradients of their own dtype.
    """

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    parameters = {n: cast(p) for n, p in module.named_parameters() if n not in ignored}
    inputs, kwargs = tree_map_only(torch.Tensor, cast, (inputs, kwargs))
    return functional_call(module, parameters, inputs, kwargs)


def reducing_in(dtype: torch.dtype, group: dist.ProcessGroup) -> CommHook:
    """Return a communication hook that takes the mean over ``group`` in ``dtype``."""

    def reduce(group: dist.ProcessGroup, bucket: GradBucket) -> Future[torch.Tensor]:
        narrow = bucket.buffer().div(mean_divisor(group)).to(dtype)
        return group.allreduce([narrow], dist.AllreduceOptions()).get_future()

    return CommHook(group, reduce)
