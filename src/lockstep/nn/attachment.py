"""Making a module parallel: first the checks, then rank 0's values, then an engine."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import cast

import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from lockstep.arguments import check_module
from lockstep.comm import LoneGroup, broadcast_tensors
from lockstep.errors import AlreadyParallel, ModelError, NothingToTrain
from lockstep.nn.agreement import check_same_model
from lockstep.nn.backward import finish_failed
from lockstep.nn.changes import watch
from lockstep.nn.engine import Engine, Options
from lockstep.nn.steps import watch_steps


class Attachment:
    """That a module is parallel, and through which engines; none where the rank is alone.

    Attributes:
        owner: The module given to parallelize(), or the wrapper.
        engines: Its own, if it has parameters of its own, and those of parallel modules in it.
    """

    def __init__(self, owner: nn.Module, engines: Sequence[Engine]) -> None:
        self.owner = weakref.ref(owner)
        self.engines = list(engines)


# Who is parallel: the module given to parallelize(), or the wrapper around it. They are left as
# they were, so that they pickle and copy as before; here their entries go when they do.
_attachments: weakref.WeakKeyDictionary[nn.Module, Attachment] = weakref.WeakKeyDictionary()
# What is in a wrapper. Weakly: a wrapper that is gone leaves its model free.
_wrapped: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Attachment]] = (
    weakref.WeakKeyDictionary()
)
# Whose each trained parameter is. Weakly, for the same reason.
_owners: WeakIdKeyDictionary = WeakIdKeyDictionary()


def attach(
    owner: nn.Module,
    module: nn.Module,
    group: dist.ProcessGroup | None,
    options: Options,
    *,
    is_copy: bool = False,
) -> None:
    """Keep ``module`` in step with its replicas for as long as ``owner`` lives.

    If it ``is_copy``, other ranks need not do the same, unless they train it.

    Modules in it that are parallel already, over this group or another, stay as they are.

    Raises:
        ModelError: If the module can't be made parallel, on this rank or on another.
    """
    group = group if group is not None and group.size() > 1 else None
    inner = [part for part in module.modules() if part in _attachments]
    refusal = _refusal(owner, module, inner, options)
    init_sync = group is not None and options.init_sync and not is_copy
    left_alone = options.left_alone(module)
    if group is not None:
        finish_failed(group)
    if group is not None and init_sync:
        # Also where there is a refusal: the other ranks would wait for this one.
        check_same_model(module, group, options._asdict(), refusal, left_alone)
    if refusal is not None:
        raise refusal
    engines = [engine for part in inner for engine in _attachments[part].engines]
    if group is not None:
        if init_sync:
            named = [*module.named_parameters(), *module.named_buffers()]
            broadcast_tensors(group, [t.detach() for name, t in named if name not in left_alone])
        own = Engine(module, group, options, inner, is_copy=is_copy)
        if own.reducer.num_parameters:
            engines.append(own)
            watch(own)
            watch_steps()
    attachment = _attachments[owner] = Attachment(owner, engines)
    if owner is not module:
        _wrapped[module] = weakref.ref(attachment)
    for parameter in module.parameters():
        if parameter.requires_grad and _owner_of(parameter) is None:
            _owners[parameter] = weakref.ref(attachment)


def attach_lone_engine(
    owner: nn.Module, module: nn.Module, group: dist.ProcessGroup | None, options: Options
) -> None:
    """Give a rank that is alone an engine too, for a hook that wants its gradients."""
    lone = group if group is not None else cast(dist.ProcessGroup, LoneGroup())
    _attachments[owner].engines.append(Engine(module, lone, options))


def check_bucket_cap(bucket_cap_mb: float, name: str = "bucket_cap_mb") -> None:
    """Refuse a bucket size that holds nothing, or that is no size."""
    if not isinstance(bucket_cap_mb, int | float) or not 0 < bucket_cap_mb < 2**40:
        raise ValueError(f"{name} is {bucket_cap_mb!r}, but must be a number of MiB, more than 0.")


def engines_of(module: nn.Module) -> list[Engine]:
    """The engines of a parallel module, as :func:`attachment_of`; none if this rank is alone."""
    return attachment_of(module).engines


def attachment_of(module: nn.Module) -> Attachment:
    """How a module is parallel.

    Args:
        module: As given to parallelize(), a wrapper, or what is in one.

    Raises:
        TypeError: If it is no module.
        ModelError: If the module isn't parallel.
    """
    check_module(module)
    attachment = _attachments.get(module)
    if attachment is None and module in _wrapped:
        attachment = _wrapped[module]()
    if attachment is not None:
        return attachment
    raise ModelError(
        f"This {type(module).__name__} isn't parallel. Call parallelize() on it first, or pass the "
        "module that was given to parallelize()."
    )


def _owner_of(parameter: nn.Parameter) -> nn.Module | None:
    attachment = reference() if (reference := _owners.get(parameter)) is not None else None
    return attachment.owner() if attachment is not None else None


def _refusal(
    owner: nn.Module, module: nn.Module, inner: Sequence[nn.Module], options: Options
) -> ModelError | None:
    """Why ``module`` can't be made parallel, if it can't."""
    kind = type(module).__name__
    if owner in _attachments:
        return AlreadyParallel(f"This {kind} is parallel already.")
    for name, part in module.named_modules():
        if isinstance(part, nn.parallel.DistributedDataParallel | nn.DataParallel):
            where = f"its part {name!r}" if name else "it"
            return AlreadyParallel(
                f"{kind} can't be made parallel: {where} is parallel already, through torch. Pass "
                "the bare model, once."
            )
    trained = False
    for name, parameter in module.named_parameters():
        if name in options.ignored:
            continue
        if is_lazy(parameter):
            return ModelError(
                f"{name!r} has no shape yet. Run one forward on a sample before making the model "
                "parallel."
            )
        if parameter.requires_grad and not parameter.is_leaf:
            return ModelError(
                f"{name!r} is computed from another tensor, which gets the gradients. Set it to "
                "nn.Parameter(value.detach()), or, if it is of a copied ScriptModule, copy the "
                "model before scripting it."
            )
        trained |= parameter.requires_grad
        other = _owner_of(parameter)
        if other is not None and other not in inner:
            return AlreadyParallel(
                f"{kind} can't be made parallel: {name!r} is parallel already, in another model "
                "that has it too or around it, and would be reduced twice. Make the whole model "
                "parallel, or first the part and then the whole."
            )
    if not trained:
        return NothingToTrain(
            f"{kind} has no parameter that requires a gradient, so there is nothing to keep in "
            "step. Use it as it is, or unfreeze a part of it first."
        )
    return None
