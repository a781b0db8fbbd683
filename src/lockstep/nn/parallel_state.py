"""Making a module parallel: first the checks, then rank 0's values, then an engine."""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Collection, Iterator, Sequence
from typing import cast

import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from lockstep.arguments import check_module
from lockstep.comm import SingleRankGroup, broadcast_tensors
from lockstep.errors import AlreadyParallel, ModelError, NothingToTrain
from lockstep.nn.agreement import check_same_model
from lockstep.nn.backward import backward_sync_of, finish_failed
from lockstep.nn.engine import Engine, Options
from lockstep.nn.global_hooks import unwatch, watch
from lockstep.nn.wrapper import Wrapper

# Bound early, as ours may be put in their place.
_TORCHS = (nn.parallel.DistributedDataParallel, nn.DataParallel)


class ParallelState:
    """That a module is parallel, and through which engines; none where the rank is alone.

    Attributes:
        engines: Its own, if it has parameters of its own, and those of parallel modules in it.
    """

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.engines = list(engines)


# Ranks may be threads, and a dictionary that another thread changes can't be gone through.
_lock = threading.Lock()
# Who is parallel: the module given to parallelize(), or the wrapper around it. They are left as
# they were, so that they pickle and copy as before; here their entries go when they do.
_attachments: weakref.WeakKeyDictionary[nn.Module, ParallelState] = weakref.WeakKeyDictionary()
# What is in a wrapper. Weakly: a wrapper that is gone leaves its model free.
_wrapped: weakref.WeakKeyDictionary[nn.Module, weakref.ref[ParallelState]] = (
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

    Modules in it that are parallel already, over this group or another, stay as they are. If it is
    in a wrapper already, ``owner`` takes that one's place.

    Raises:
        ModelError: If the module can't be made parallel, on this rank or on another.
    """
    group = group if group is not None and group.size() > 1 else None
    inner = [part for part in module.modules() if part in _attachments]
    previous = _wrapped[module]() if module in _wrapped and owner is not module else None
    refusal = _refusal(owner, module, inner, previous, options) or _refusal_of_threads(group)
    init_sync = group is not None and options.init_sync and not is_copy
    left_alone = options.left_alone(module)
    if group is not None:
        finish_failed(group)
    for engine in previous.engines if previous is not None else ():
        engine.backward_sync.finish_failed()
    if group is not None and init_sync:
        # Also where there is a refusal: the other ranks would wait for this one.
        check_same_model(module, group, options._asdict(), refusal, left_alone)
    if refusal is not None:
        raise refusal
    theirs = [engine for part in inner for engine in _attachments[part].engines]
    own: list[Engine] = []
    if group is not None:
        if init_sync:
            named = [*module.named_parameters(), *module.named_buffers()]
            broadcast_tensors(group, [t.detach() for name, t in named if name not in left_alone])
        engine = Engine(
            module,
            group,
            options,
            inner,
            backward_sync=backward_sync_of(group),
            is_copy=is_copy,
        )
        if engine.parameters:
            own.append(engine)
            watch(engine)
    attachment = ParallelState([*theirs, *own])
    with _lock:
        _attachments[owner] = attachment
    if previous is not None:
        _replace([engine for engine in previous.engines if engine not in theirs], own)
        with _lock:
            for other in [one for one, its in _attachments.items() if its is previous]:
                _attachments[other] = attachment
    if owner is not module:
        _wrapped[module] = weakref.ref(attachment)
    for parameter in module.parameters():
        if parameter.requires_grad and _owner_of(parameter) in (None, previous):
            _owners[parameter] = weakref.ref(attachment)


def release(wrapper: nn.Module) -> None:
    """Let the model in ``wrapper`` be parallel no more: gradients are this rank's own."""
    attachment = attachment_of(wrapper)
    for engine in attachment.engines:
        engine.backward_sync.finish_failed()
    _replace(list(attachment.engines), ())
    for parameter in wrapper.parameters():
        if _owner_of(parameter) is attachment:
            del _owners[parameter]


def _replace(engines: Collection[Engine], instead: Sequence[Engine]) -> None:
    """Let ``engines`` do nothing any more, and those that are ``instead`` be in their place."""
    for engine in engines:
        engine.detach()
        engine.backward_sync.remove(engine)
        unwatch(engine)
    with _lock:
        for other in _attachments.values():
            kept = [engine for engine in other.engines if engine not in engines]
            if len(kept) < len(other.engines):
                other.engines[:] = [*kept, *instead]


def attach_lone_engine(
    owner: nn.Module, module: nn.Module, group: dist.ProcessGroup | None, options: Options
) -> None:
    """Give a rank that is alone an engine too, for a hook that wants its gradients."""
    lone = group if group is not None else cast(dist.ProcessGroup, SingleRankGroup())
    _attachments[owner].engines.append(
        Engine(module, lone, options, backward_sync=backward_sync_of(lone))
    )


def check_bucket_cap(bucket_cap_mb: float, name: str = "bucket_cap_mb") -> None:
    """Refuse a bucket size that holds nothing, or that is no size."""
    if not isinstance(bucket_cap_mb, int | float) or not 0 < bucket_cap_mb < 2**40:
        raise ValueError(f"{name} is {bucket_cap_mb!r}, but must be a number of MiB, more than 0.")


def engines_of(module: nn.Module) -> list[Engine]:
    """The engines of a parallel module, as :func:`attachment_of`; none if this rank is alone."""
    return attachment_of(module).engines


def attachment_of(module: nn.Module) -> ParallelState:
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


@contextlib.contextmanager
def accumulating(engines: Sequence[Engine]) -> Iterator[None]:
    """Let backwards in this context add up gradients on each rank, without reducing them."""
    before = [engine.is_syncing for engine in engines]
    for engine in engines:
        engine.is_syncing = False
    try:
        yield
    finally:
        for engine, was_syncing in zip(engines, before, strict=True):
            engine.is_syncing = was_syncing


def _owner_of(parameter: nn.Parameter) -> ParallelState | None:
    reference: weakref.ref[ParallelState] | None = _owners.get(parameter)
    return reference() if reference is not None else None


def _refusal_of_threads(group: dist.ProcessGroup | None) -> ModelError | None:
    """Why ranks that are threads can't train, if they can't: torch would crash."""
    dynamo = sys.modules.get("torch._dynamo")
    if group is None or dynamo is None or not dynamo.config.compiled_autograd:
        return None
    if group.name() != "threads":
        return None
    return ModelError(
        "torch._dynamo.config.compiled_autograd is on. It runs one backward at a time in a "
        "process, and here each rank is a thread, whose backward waits for those of the others. "
        "Let ranks be processes, or leave it off."
    )


def _refusal(
    owner: nn.Module,
    module: nn.Module,
    inner: Sequence[nn.Module],
    previous: ParallelState | None,
    options: Options,
) -> ModelError | None:
    """Why ``module`` can't be made parallel, if it can't."""
    kind = type(module).__name__
    if owner in _attachments:
        return AlreadyParallel(
            f"This {kind} is parallel already. Go on with it as it is: parallelize() is called "
            "once for each model, and changes it in place."
        )
    for name, part in module.named_modules():
        if isinstance(part, _TORCHS) and not isinstance(part, Wrapper):
            where = f"its part {name!r}" if name else "it"
            return AlreadyParallel(
                f"{kind} can't be made parallel: {where} is parallel already, through torch. Pass "
                "the bare model, once."
            )
    trained, known = False, [None, previous, *(_attachments[part] for part in inner)]
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
        if _owner_of(parameter) not in known:
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
