"""Means over the ranks: of the losses of a global batch, and of gradients after a backward."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lockstep.arguments import as_finite_number, check_module, check_not_divided, refusal
from lockstep.comm import (
    context_of,
    device_of_facts,
    mean_divisor,
    start_all_reduce,
    sum_announced,
    uncompiled,
    without_wait,
)
from lockstep.errors import ModelError
from lockstep.grad import MIB, Reducer
from lockstep.nn.autograd import (
    is_backward_of_replicas,
    may_be_distributed,
    reached,
    refuse_distributed_context,
    refuse_transforms,
)
from lockstep.nn.backward import backward_sync_of, finish_failed
from lockstep.nn.parallel_state import begun_batch, count_micro_batch, note_factor
from lockstep.nn.replicas.group import (
    mark_as_one,
    num_replicas,
    refuse_in_replica,
    this_replica,
)
from lockstep.nn.shard import current_shard, mean_in_shard, refuse_in_shard
from lockstep.nn.tracked import sparse_indices
from lockstep.nn.verify import check_same_model
from lockstep.spans import span
from lockstep.world import device_of_sums, group_or_all

_CAP_BYTES = 25 * MIB
# A loss times less than this may be divided by the number of micro-batches; half a square isn't.
_SUSPICIOUS_FACTOR = 0.4


class _Compared(weakref.WeakSet[nn.Module]):
    """The models that the ranks of a group were found to have alike, in its context."""


@uncompiled
def mean(
    values: torch.Tensor,
    *,
    weight: torch.Tensor | float | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Return the mean of ``values`` over the global batch, the parts of all ranks together.

    The mean of the ranks' means would differ from it if ranks have different numbers of samples or
    tokens. The value is the same on every rank, and after ``backward()`` the gradients of a
    parallel model (or those that :func:`lockstep.average_gradients` averages) are those that one
    process would have computed from the whole batch. ::

        loss = lockstep.mean(F.cross_entropy(model(x), y, reduction="none"))
        loss.backward()

    ``torch.autograd.grad()`` of it returns this rank's gradients before they are averaged: for
    inputs, they are too large by a factor of the number of ranks. For a gradient penalty,
    differentiate the sum of this rank's own values instead.

    Under :func:`lockstep.accumulate` the gradients are those of the mean over all micro-batches of
    the step, whatever their sizes. In a loop over :func:`lockstep.shards` it blocks for no rank: it
    returns the mean over the shard, and the gradients are those of the mean over all shards.

    Every rank must call it, and it blocks until all have. A rank without samples passes its model's
    output for an empty batch or, if the ranks train one model, any tensor without elements.

    In a module that :class:`lockstep.DataParallel` replicates, it is the mean over all replicas,
    and the module's output is then one number, instead of one for each replica.

    Args:
        values: Losses (or metrics) of single samples or tokens, floating-point, of any shape. A
            single number needs a weight: the number of samples of which it is the mean.
        weight: The weight of each value, broadcast to the shape of ``values``, such as 0 for
            padding. By default all values have the same weight.
        process_group: The ranks; by default all of ``lockstep.init()``.

    Returns:
        A tensor without dimensions, of the dtype of ``values``: the sum of ``weight * values``
        over all ranks, divided by the sum of ``weight``. NaN if all weights are zero, as torch's
        mean of no values.

    Raises:
        ModelError: In a transform of ``torch.func``, or in forward-mode AD.
        TypeError: If ``values`` isn't a floating-point tensor, or ``weight`` isn't numbers, or one
            of them is a DTensor.
        ValueError: If the weights can't be broadcast to the shape of ``values``, or require a
            gradient, or ``values`` is a number without a weight. On every rank, if weights of any
            rank are infinite or NaN; on a GPU, where a check would have to wait, the mean is NaN.
    """
    if not isinstance(values, torch.Tensor) or not values.is_floating_point():
        kind = values.dtype if isinstance(values, torch.Tensor) else type(values).__name__
        raise TypeError(
            f"mean() takes a floating-point tensor of single losses, and got {kind}. Compute the "
            'loss with reduction="none".'
        )
    if values.is_nested:
        raise TypeError("mean() takes no nested tensor. Give torch.cat(values.unbind()).")
    check_not_divided("values", values)
    check_not_divided("weight", weight)
    refuse_transforms(values, weight)
    if not values.dim() and weight is None:
        raise ValueError(
            "mean() got a single number. If that is the mean of this rank's losses, the mean over "
            'all samples can\'t be told from it: compute the loss with reduction="none", or give '
            "weight=len(batch), the number of samples that it is the mean of."
        )
    counts = _counts(values, weight)
    if (shard := current_shard()) is not None:
        return mean_in_shard(shard, values, counts, weight)
    total = (values.detach().to(counts.device).double() * counts).sum()
    # A rank without samples in earlier micro-batches learns from the others that there were some.
    rank, has_begun = begun_batch()
    facts = torch.stack([total, counts.sum(), torch.full_like(total, has_begun)])
    replica, group = this_replica(), None
    # In a replica's backward, a checkpoint recomputes the forward for its saved tensors. A mean
    # saves none, so that any value will do.
    is_recomputed = replica is None and is_backward_of_replicas()
    if replica is not None:
        # Over this rank's replicas, then over the ranks. The backward needs no group: if this
        # replica has no samples, other replicas reach the model.
        over_ranks = partial(_sum_over_ranks, process_group=process_group)
        facts = replica.add_up(facts, over_ranks)
        facts = torch.cat([facts[:3], facts[3:] * num_replicas()])
    elif is_recomputed:
        facts = torch.cat([facts, torch.ones_like(facts[:1])])
    else:
        group = _group_of_several(process_group)
        facts = _sum_over_ranks(facts, process_group)
    if facts.device.type == "cpu" and not facts[1].isfinite():
        raise ValueError(
            f"The weights of all ranks add up to {facts[1].item()}, and those of this one to "
            f"{counts.sum().item()}. mean() takes finite weights: give 0 where nothing is to count."
        )
    # The backward of a rank without samples ends in this tensor. It also tells backward() from
    # autograd.grad(), which doesn't reach it.
    needs_gradient = values.requires_grad or not values.numel()
    anchor = torch.zeros((), device=values.device, requires_grad=needs_gradient)
    result: torch.Tensor = _Mean.apply(  # type: ignore[no-untyped-call]
        values, anchor, counts, facts, group, rank, is_recomputed
    )
    if replica is not None:
        mark_as_one(result)
    return result


def _sum_over_ranks(local: torch.Tensor, process_group: dist.ProcessGroup | None) -> torch.Tensor:
    """The sum of ``local``, of one dimension, over the ranks; as its last element, their number."""
    group = _group_of_several(process_group)
    num_ranks = 1
    if group is not None:
        sync = backward_sync_of(group)
        sync.finish_failed()
        engines = sync.engines()
        if engines and may_be_distributed():  # RPC may have begun after they were made
            refuse_distributed_context("model")
        for engine in engines:
            if engine.is_stale:  # its model has changed since its last forward
                sync.refresh(engine)
            if engine.watch.is_to_look:  # no forward of a module has done so
                engine.look()
        sum_announced(group, local)
        num_ranks = mean_divisor(group)
    return torch.cat([local, local.new_full((1,), num_ranks)])


def _counts(values: torch.Tensor, weight: torch.Tensor | float | None) -> torch.Tensor:
    """The weight of each of ``values``, in float64, on the device of their sum."""
    device = device_of_sums(values.device)
    if isinstance(weight, torch.Tensor) and weight.requires_grad:
        raise ValueError(
            "mean() doesn't differentiate its weights, and these require a gradient. Give "
            "weight.detach(), or multiply the losses yourself."
        )
    if weight is None:
        return torch.ones((), dtype=torch.float64, device=device).expand(values.shape)
    try:
        counts = weight
        if not isinstance(counts, torch.Tensor):
            counts = torch.as_tensor(weight, dtype=torch.float64, device="cpu")
        torch.empty(counts.shape, device="meta").expand(values.shape)
    except (OverflowError, RuntimeError, TypeError, ValueError) as error:
        wanted = (
            f"a number or a tensor that can be broadcast to {tuple(values.shape)}, as values is"
        )
        kind = ValueError if isinstance(weight, torch.Tensor) else TypeError
        raise kind(refusal("weight", weight, wanted)) from error
    # Apart from that: what a device reports here may be an error of an earlier kernel.
    if counts.device.type == "cpu":
        return without_wait(counts.double(), device).expand(values.shape)
    return counts.to(device).double().expand(values.shape)


@uncompiled
class _Mean(torch.autograd.Function):
    """Returns the mean, which is known, and differentiates it by this rank's values."""

    @staticmethod
    def forward(
        ctx: Any,
        values: torch.Tensor,
        anchor: torch.Tensor,
        counts: torch.Tensor,
        facts: torch.Tensor,
        group: dist.ProcessGroup | None,
        rank: int,
        is_recomputed: bool,
    ) -> torch.Tensor:
        # Not by save_for_backward(): a checkpoint would replace them by recomputed ones.
        ctx.anchor, ctx.counts, ctx.facts = anchor, counts, facts
        ctx.group, ctx.rank, ctx.is_recomputed = group, rank, is_recomputed
        ctx.dtype = values.dtype
        total, count, *_ = facts
        value: torch.Tensor = total / count
        return value.to(values.dtype).to(values.device)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        if ctx.is_recomputed:
            raise ModelError(
                "lockstep.mean inside of a reentrant checkpoint inside of DataParallel would be a "
                "mean over one replica. Use checkpoint(..., use_reentrant=False), or take the mean "
                "outside of it."
            )
        _, count, goes_on, num_means = ctx.facts
        has_samples = ctx.needs_input_grad[0]
        is_backward = is_backward_of_replicas() or bool(reached([ctx.anchor]))
        if ctx.group is not None and is_backward and not has_samples:
            backward_sync_of(ctx.group).take_part_at_the_end()
        divisor = count_micro_batch(count, goes_on, ctx.rank, has_samples, is_backward)
        if gradient.device.type == "cpu" and (factor := gradient.item()) < _SUSPICIOUS_FACTOR:
            note_factor(ctx.rank, factor)
        divisor = divisor.to(count.device)  # another replica may have made it, on its own device
        # The reduction divides gradients by the number of means, so this multiplies by it.
        slope = gradient.to(count.device).double() * num_means
        slope = slope / torch.where(divisor != 0, divisor, 1)
        return (slope * ctx.counts).to(ctx.dtype).to(gradient.device), *[None] * 6


@uncompiled
def average_gradients(
    module: nn.Module,
    *,
    weight: float | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Replace each parameter's ``.grad`` by its mean over the ranks. ::

        criterion(model(x), y).backward()
        lockstep.average_gradients(model, weight=len(x))
        optimizer.step()

    For models that are not parallel: call it after ``backward()`` and before the optimizer's step.
    A rank without a gradient of a parameter counts as zero; if no rank has one, the parameter stays
    without. Every rank must call it; it blocks until all have. On one rank it changes nothing.

    Args:
        module: The model, the same on every rank.
        weight: The weight of this rank's gradients in the mean: the number of samples of which
            its loss is the mean, so that uneven parts give the gradients of one process on all
            samples. A rank of weight 0 contributes nothing, whatever its gradients are. By default
            all ranks have the same weight.
        process_group: The ranks to average over; by default all of ``lockstep.init()``.

    Raises:
        ModelMismatch: If the ranks' models differ, which the first call checks.
        AlreadyParallel: If torch has divided the model (FSDP, DTensors).
        TypeError: If ``module`` isn't a module, or ``weight`` not a number.
        ValueError: If a weight is negative or not finite, or all are zero.

    Source: the function of this name in PyTorch's tutorial "Writing Distributed Applications".
    """
    check_module(module)
    refuse_in_replica("lockstep.average_gradients")
    refuse_in_shard("lockstep.average_gradients() is called")
    wanted = "a finite number of samples, 0 or more"
    local_weight = 1.0 if weight is None else as_finite_number("weight", weight, wanted, at_least=0)
    group = _group_of_several(process_group)
    if group is None:
        _check_total(local_weight)
        return
    with span("average"):
        _average_gradients(module, group, local_weight)


def _average_gradients(module: nn.Module, group: dist.ProcessGroup, local_weight: float) -> None:
    finish_failed(group)
    compared = context_of(group).get(_Compared)
    if module not in compared:
        check_same_model(module, group)
        compared.add(module)
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    if not named:
        return
    if local_weight == 0:
        # Not zero times the gradient, which is NaN where the gradient is infinite or NaN.
        module.zero_grad(set_to_none=True)
    weights = torch.tensor([local_weight], dtype=torch.float64, device=device_of_facts(group))
    start_all_reduce(group, weights).wait()
    total = weights.item()
    _check_total(total)
    parameters = [parameter for _, parameter in named]
    sparse = sparse_indices(module, parameters)
    reducer = Reducer(named, group, cap_bytes=_CAP_BYTES, sparse=sparse, is_kept=False)
    for parameter in parameters:
        reducer.mark_accumulated(parameter)
    reducer.begin(scale=local_weight / total)
    reducer.finish()


def _check_total(weight: float) -> None:
    if weight == 0:
        raise ValueError("Every rank gave a weight of 0, so there is nothing to average.")


def _group_of_several(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    group = group_or_all(process_group)
    return group if group is not None and group.size() > 1 else None
