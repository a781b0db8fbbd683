"""``clip_grad_norm_``: torch's function, with the work divided among the ranks."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import clip_grad_norm_ as _torchs

from lockstep.comm import Announced, join_state_of, start_all_reduce, uncompiled
from lockstep.grad import UnsummedBucket, bucket_of
from lockstep.nn import Call, finish_failed
from lockstep.world import device_of_sums

# The number of elements whose norm a CPU takes at once: after their sum they are in its cache.
_NUMEL = 64 * 1024


@uncompiled
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Clip the norm of all gradients together, in place, as torch's function of this name does. ::

        loss.backward()
        lockstep.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()

    If the optimizer is sharded, each rank sums a part of the gradients and takes the norm of that,
    so that no rank sums all gradients. Otherwise torch's function is called. The norm may differ
    from torch's in the last digits.

    Every rank must call it, after the backward and before the step; it blocks.

    Args:
        parameters: The parameters, or one parameter.
        max_norm: The largest norm of all gradients together that is not scaled down.
        norm_type: The p of the norm; ``inf`` for the largest absolute value.
        error_if_nonfinite: Whether a norm that is NaN or infinite raises an error.
        foreach: As for torch's; only for parameters whose optimizer isn't sharded.

    Returns:
        The norm before clipping, a tensor without dimensions, the same on every rank.

    Raises:
        RuntimeError: If the norm isn't finite, with ``error_if_nonfinite``.

    Source: ``torch.nn.utils.clip_grad_norm_``.
    """
    every = [parameters] if isinstance(parameters, Tensor) else [*parameters]
    buckets = [*dict.fromkeys(found[0] for p in every if (found := bucket_of(p)) is not None)]
    power = float(norm_type)
    # Those of which every parameter is given once: torch's function counts and scales a gradient as
    # often as its parameter is given.
    whole = {bucket for bucket in buckets if _is_whole(bucket, every)}
    groups = dict.fromkeys(bucket.group for bucket in buckets)
    for group in groups:
        sums = (bucket for bucket in whole if bucket.group is group and bucket.are_all_unsummed())
        finish_failed(group, Call(Announced.SUM, sum(1 for _ in sums)))
    # In join(), ranks without data don't call this function, so nothing can be divided.
    if not buckets or not power > 0 or any(map(join_state_of, groups)):
        return _torchs(every, max_norm, norm_type, error_if_nonfinite, foreach)
    norms = []
    for bucket in buckets:
        ids = {*map(id, bucket.contents.parameters)}
        norm = _norm(bucket, power, is_whole=bucket in whole)
        if norm is not None:
            norms.append(norm)
            every = [parameter for parameter in every if id(parameter) not in ids]
        else:
            bucket.sum_unsummed()
    if not norms:  # all gradients are there, as after steps in shards
        return _torchs(every, max_norm, norm_type, error_if_nonfinite, foreach)
    clipped = [bucket for bucket in buckets if bucket.are_all_unsummed()]
    gradients = [parameter.grad for parameter in every if parameter.grad is not None]
    if gradients:
        norm = torch.nn.utils.get_total_norm(gradients, power, foreach=foreach)
        norms.append(norm.to(_dtype_of_sums(norm.device)))
    dtypes = [gradient.dtype for gradient in gradients]
    dtypes += [bucket.contents.parameters[0].dtype for bucket in clipped]
    dtype = functools.reduce(torch.promote_types, dtypes or [torch.float]).to_real()
    norms = norms or [torch.zeros((), dtype=torch.float64, device="cpu")]
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms), power).to(dtype)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"The norm of order {norm_type} of the gradients is {total.item()}, so that they can't "
            "be clipped. Leave error_if_nonfinite out to scale them all the same."
        )
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for bucket in clipped:
        bucket.scale_means(factor)
    for gradient in gradients:
        gradient.mul_(factor)
    return total


def _is_whole(bucket: UnsummedBucket, given: Iterable[Tensor]) -> bool:
    ids = {*map(id, bucket.contents.parameters)}
    found = [id(parameter) for parameter in given if id(parameter) in ids]
    return len(found) == len(ids) == len({*found})


def _norm(bucket: UnsummedBucket, power: float, *, is_whole: bool) -> Tensor | None:
    """Return the norm of all gradients of ``bucket``, of which each rank sums a part.

    It is None on every rank if, on any rank, ``is_whole`` is false or a gradient is summed already.
    On a GPU, where to learn of other ranks would wait for it, gradients are scattered: there every
    rank reads one or none does.
    """
    group, is_summed = bucket.group, is_whole and bucket.are_all_unsummed()
    device = bucket.contents.gradients.device
    tells = device.type == "cpu"
    if not (is_summed or tells):
        return None
    total = torch.zeros(2, dtype=_dtype_of_sums(device), device=device)
    total[1].fill_(not is_summed)
    first, last = bucket.local_range() if is_summed else (0, 0)
    numel = _NUMEL if tells else max(1, last - first)
    for start in range(first, last, numel):
        part = bucket.new_sum(start, min(start + numel, last))
        norm = torch.linalg.vector_norm(part, power).to(total.dtype)
        total[0] = torch.maximum(total[0], norm) if power == math.inf else total[0] + norm**power
    op = dist.ReduceOp.MAX if power == math.inf else dist.ReduceOp.SUM
    start_all_reduce(group, total, op).wait()
    if tells and total[1]:
        return None
    return total[0] if power == math.inf else total[0] ** (1 / power)


def _dtype_of_sums(device: torch.device) -> torch.dtype:
    return torch.float64 if device_of_sums(device) == device else torch.float32
