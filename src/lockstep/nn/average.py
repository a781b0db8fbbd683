"""``average_gradients(model)``: the mean over the ranks, after a backward."""

from __future__ import annotations

import weakref

import torch
import torch.distributed as dist
from torch import nn

from lockstep.arguments import as_finite_number, check_module
from lockstep.comm import start_all_reduce, uncompiled
from lockstep.grad import MIB, Bucket, assign_buckets, gradient_dtype, reduce_sparse
from lockstep.nn.backward import finish_failed
from lockstep.nn.engine import with_sparse_gradients
from lockstep.nn.verify import check_same_model
from lockstep.world import group_or_all

_CAP_BYTES = 25 * MIB

# The group whose ranks were last compared and found to have the same model.
_compared: weakref.WeakKeyDictionary[nn.Module, dist.ProcessGroup] = weakref.WeakKeyDictionary()


@uncompiled
def average_gradients(
    module: nn.Module,
    *,
    weight: float | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Replace each parameter's ``.grad`` by its mean over the ranks.

    For models that are not parallel: it is called after ``backward()`` and before the optimizer's
    step. A parameter without a gradient counts as zero where another rank has one, and is left
    without where none has. Every rank must call it; it blocks until all have. On one rank it
    does nothing.

    Args:
        module: The model, the same on every rank.
        weight: The weight of this rank's gradients in the mean: the number of samples of which
            its loss is the mean, so that uneven parts give the gradients of one process on all
            samples. A rank of weight 0 contributes nothing, whatever its gradients are. By default
            all ranks have the same weight.
        process_group: The ranks to average over; by default all of ``lockstep.init()``.

    Raises:
        ModelMismatch: If the ranks' models differ, which the first call checks.
        TypeError: If ``module`` isn't a module, or ``weight`` not a number.
        ValueError: If a weight is negative or not finite, or all are zero.

    Source: the function of this name in PyTorch's tutorial "Writing Distributed Applications".
    """
    check_module(module)
    wanted = "a finite number of samples, 0 or more"
    own = 1.0 if weight is None else as_finite_number("weight", weight, wanted, at_least=0)
    group = group_or_all(process_group)
    if group is None or group.size() == 1:
        return
    finish_failed(group)
    if _compared.get(module) is not group:
        check_same_model(module, group)
        _compared[module] = group
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    parameters = [parameter for _, parameter in named]
    if not named:
        return
    if own == 0:
        # Not zero times the gradient, which is NaN where the gradient is infinite or NaN.
        module.zero_grad(set_to_none=True)
    used = [float(parameter.grad is not None) for parameter in parameters]
    facts = torch.tensor([own, *used], dtype=torch.float64, device=parameters[0].device)
    start_all_reduce(group, facts).wait()
    total, *is_used = facts.tolist()
    if total == 0:
        raise ValueError("Every rank gave a weight of 0, so there is nothing to average.")
    sparse = with_sparse_gradients(module)
    groups = assign_buckets(
        [p.numel() * gradient_dtype(p).itemsize for p in parameters],
        [(gradient_dtype(p), p.device) for p in parameters],
        [i for i, p in enumerate(parameters) if id(p) not in sparse],
        cap_bytes=_CAP_BYTES,
    )
    with torch.no_grad():
        buckets = []
        for indices in groups:
            accumulated = memoryview(bytearray(b"\1" * len(indices)))
            buckets.append(Bucket([named[i] for i in indices], accumulated))
        for bucket in buckets:
            bucket.fill(own / total)
            bucket.launch(group)
        for bucket, indices in zip(buckets, groups, strict=True):
            bucket.wait(group)
            for position, index in enumerate(indices):
                if is_used[index]:
                    bucket.use_as_grad(position)
        for parameter, was_used in zip(parameters, is_used, strict=True):
            if was_used and id(parameter) in sparse:
                parameter.grad = reduce_sparse(parameter, group, own / total)
