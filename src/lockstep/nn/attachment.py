"""Making a module parallel: first the checks, then rank 0's values, then an engine."""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from lockstep.comm import broadcast_tensors
from lockstep.errors import AlreadyParallel, ModelError, NothingToTrain
from lockstep.nn.agreement import check_same_model
from lockstep.nn.engine import Engine


class _Attachment:
    """That a module is parallel, and through which engine; None where the rank is alone."""

    def __init__(self, engine: Engine | None) -> None:
        self.engine = engine


class Options(NamedTuple):
    """How a module is to be kept in step; the same on every rank.

    Attributes:
        bucket_cap_mb: How much makes a bucket full, in MiB.
        broadcast_buffers: Whether rank 0's buffers go to everyone with each reduced backward.
        init_sync: Whether to check the model and start from rank 0's values.
    """

    bucket_cap_mb: float
    broadcast_buffers: bool
    init_sync: bool


# Who is parallel: the module given to parallelize(), or the wrapper around it. They are left as
# they were, so that they pickle and copy as before; here their entries go when they do.
_attachments: weakref.WeakKeyDictionary[nn.Module, _Attachment] = weakref.WeakKeyDictionary()
# Whose each trained parameter is. Weakly: a wrapper that is gone leaves its parameters free.
_owners: WeakIdKeyDictionary = WeakIdKeyDictionary()


def attach(
    owner: nn.Module, module: nn.Module, group: dist.ProcessGroup | None, options: Options
) -> None:
    """Keep ``module`` in step with its replicas for as long as ``owner`` lives.

    Raises:
        TypeError: If ``module`` is no module.
        ValueError: If an option makes no sense.
        ModelError: If the module can't be made parallel, on this rank or on another.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"{module!r} is a {type(module).__name__}, not a torch.nn.Module.")
    group = group if group is not None and group.size() > 1 else None
    refusal = _refusal(module)
    if group is not None and options.init_sync:
        # Also where there is a refusal: the other ranks would wait for this one.
        check_same_model(module, group, options._asdict(), refusal)
    if refusal is not None:
        raise refusal
    engine = None
    if group is not None:
        if options.init_sync:
            broadcast_tensors(group, [*module.parameters(), *module.buffers()])
        engine = Engine(
            module,
            group,
            bucket_cap_mb=options.bucket_cap_mb,
            broadcast_buffers=options.broadcast_buffers,
        )
    attachment = _attachments[owner] = _Attachment(engine)
    for parameter in module.parameters():
        if parameter.requires_grad:
            _owners[parameter] = weakref.ref(attachment)


def check_bucket_cap(bucket_cap_mb: float) -> None:
    """Refuse a bucket size that holds nothing, or that is no size."""
    if not isinstance(bucket_cap_mb, int | float) or not 0 < bucket_cap_mb < 2**40:
        raise ValueError(
            f"bucket_cap_mb is {bucket_cap_mb!r}, but must be a number of MiB, more than 0."
        )


def engine_of(module: nn.Module) -> Engine | None:
    """The engine of a parallel module; None if this rank is alone.

    Raises:
        ModelError: If the module isn't parallel.
    """
    attachment = _attachments.get(module) if isinstance(module, nn.Module) else None
    if attachment is None:
        raise ModelError(
            f"This {type(module).__name__} isn't parallel. Call parallelize() on it first, or "
            "pass the module that was given to parallelize()."
        )
    return attachment.engine


def _refusal(module: nn.Module) -> ModelError | None:
    """Why ``module`` can't be made parallel, if it can't."""
    kind = type(module).__name__
    for name, part in module.named_modules():
        if isinstance(part, nn.parallel.DistributedDataParallel | nn.DataParallel):
            where = f"its part {name!r}" if name else "it"
            return AlreadyParallel(
                f"{kind} can't be made parallel: {where} is parallel already, through torch. Pass "
                "the bare model, once."
            )
    for name, parameter in module.named_parameters():
        if is_lazy(parameter):
            return ModelError(
                f"{name!r} has no shape yet. Run one forward on a sample before making the model "
                "parallel."
            )
        owner = _owners.get(parameter)
        if owner is not None and owner() is not None:
            return AlreadyParallel(
                f"{kind} can't be made parallel: {name!r} is parallel already, with this model, "
                "a part of it, or another one that shares it, and would be reduced twice. Make "
                "the whole model parallel, once."
            )
    if not any(parameter.requires_grad for parameter in module.parameters()):
        return NothingToTrain(
            f"{kind} has no parameter that requires a gradient, so there is nothing to keep in "
            "step. Use it as it is, or unfreeze a part of it first."
        )
    return None
