"""``parallelize(model)``: the same object, kept in step with its replicas on other ranks.

It verifies the model on all ranks, gives them rank 0's values, and makes an engine.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Never, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from lockstep.arguments import check_flag, check_module
from lockstep.comm import broadcast_tensors
from lockstep.errors import AlreadyParallel, ModelError, NothingToTrain
from lockstep.nn.backward import backward_sync_of, finish_failed
from lockstep.nn.buffers import BroadcastBuffers, check_policies
from lockstep.nn.engine import Engine, Options
from lockstep.nn.global_hooks import unwatch, watch
from lockstep.nn.join import UnevenLoop
from lockstep.nn.parallel_state import (
    ParallelState,
    all_states,
    find_state,
    find_state_around,
    set_state,
    state_of,
)
from lockstep.nn.verify import check_same_model
from lockstep.nn.wrapper import Wrapper
from lockstep.world import group_or_all

_log = logging.getLogger(__name__)

# Bound early, as ours may be put in their place.
_TORCHS = (nn.parallel.DistributedDataParallel, nn.DataParallel)

ModuleT = TypeVar("ModuleT", bound=nn.Module)

DEFAULT_BUCKET_CAP_MB = 25


def parallelize(
    module: ModuleT,
    *,
    process_group: dist.ProcessGroup | None = None,
    bucket_cap_mb: float = DEFAULT_BUCKET_CAP_MB,
    broadcast_buffers: BroadcastBuffers = True,
    init_sync: bool = True,
    **others: Never,
) -> ModuleT:
    """Keep ``module`` in step with its replicas on the other ranks, in place.

    It stays the same object of the same class, with the same methods, attributes and
    ``state_dict`` keys. From now on a ``backward()`` leaves in ``.grad`` the mean over all
    ranks, whichever method computed the loss. A parameter that one rank didn't use counts as
    zero there; one that no rank used keeps its ``.grad``, None included.

    Every rank must call it with the same model, and then run backwards in the same order. On
    one rank it changes nothing.

    Parameters may be frozen, unfrozen, replaced and added later, on every rank alike: new ones
    start from rank 0's values at the next forward. (One that is unfrozen only for backwards under
    :func:`no_sync`, and frozen again before the reducing one, keeps its gradient to itself.)
    Parts that are parallel already, over these ranks or others (an expert over some of them,
    say), keep their own options.

    Hooks of ``register_post_accumulate_grad_hook()``, such as optimizers that step in them, see the
    mean over the ranks, and run on every rank when it has come: those of backwards that reduce
    nothing, as under :func:`no_sync`, at once.

    ``torch.autograd.grad()`` fills no ``.grad`` and so reduces nothing: what it returns is this
    rank's own. With ``backward(create_graph=True)`` the reduced gradients have no graph; to
    differentiate gradients, take them with ``autograd.grad()``, make a loss of them, and run
    its ``backward()``, which is reduced.

    Args:
        module: The model, already on its device and with its final dtypes. Rank 0's parameters
            and buffers go to everyone.
        process_group: The ranks to keep in step; by default all of ``lockstep.init()``.
        bucket_cap_mb: The size of a full bucket, in MiB. Gradients are sent in buckets, each when
            it is full, while backward computes the next ones.
        broadcast_buffers: Whether buffers (BatchNorm's statistics) follow rank 0's, with each
            backward that reduces gradients. Or, for each pattern of names, such as
            ``{"*.running_*": "mean"}``, one of ``"rank0"``; ``"mean"``, the mean over the ranks,
            of integers rank 0's; ``"late"``, that mean, but only when :func:`sync_buffers` is
            called, which saves the exchange in each step; and ``"local"``, left alone. The first
            pattern that fits counts, and without one "rank0".
        init_sync: Whether to check that all ranks have the same model and to give them rank 0's
            values. Without it, that is up to you.

    Returns:
        ``module`` itself.

    Raises:
        ModelMismatch: If the ranks' models or options differ; it names the first difference.
        NothingToTrain: If no parameter requires a gradient.
        AlreadyParallel: If it is parallel already, or shares parameters with a model that is.
        TypeError: If an argument is of a wrong type, or there are others: of torch's it says what
            is done instead.
        ValueError: If ``bucket_cap_mb`` is no size, or a policy none of those above.
    """
    if others:
        raise TypeError(_others_are_refused(others))
    check_module(module)
    check_flag("init_sync", init_sync)
    check_bucket_cap(bucket_cap_mb)
    check_policies(broadcast_buffers)
    options = Options(bucket_cap_mb, broadcast_buffers, init_sync)
    attach(module, module, group_or_all(process_group), options)
    return module


def _others_are_refused(names: Collection[str]) -> str:
    wrapper = inspect.signature(nn.parallel.DistributedDataParallel).parameters
    if not all(name in wrapper for name in names):
        own = ", ".join(inspect.signature(parallelize).parameters)
        return f"parallelize() got {', '.join(names)}, and takes {own.removesuffix(', others')}."
    return (
        f"parallelize() takes no {', '.join(names)}, which torch's DistributedDataParallel does. "
        "What these say of the graph, of unused parameters and of views isn't needed here: leave "
        "them out. lockstep.DistributedDataParallel(model, ...) takes all of torch's arguments."
    )


def join(
    *modules: nn.Module,
    divide_by_initial_world_size: bool = True,
    throw_on_early_termination: bool = False,
) -> AbstractContextManager[None]:
    """Let ranks leave a training loop at different times.

    A rank that leaves the context goes on with the reductions of the others, to which it adds
    nothing, until all are through; then all take the models of the last. SyncBatchNorm and
    :func:`lockstep.mean` may be in the loop. Every rank must enter it. ::

        with lockstep.join(model):
            for x, y in batches:  # of any number on each rank, none included
                ...

    Args:
        modules: All models that are trained in the loop. Each was given to :func:`parallelize`, is
            a wrapper, or is the module in one; they are parallel over the same ranks.
        divide_by_initial_world_size: Whether gradients are divided by the number of all ranks, or
            else by the number of ranks that still have data.
        throw_on_early_termination: Whether the first rank that is through ends the loop on every
            rank, with a RuntimeError.

    Raises:
        ModelError: If one isn't parallel, or is so over other ranks than the first.
        TypeError: If there is none.

    Source: ``torch.nn.parallel.DistributedDataParallel.join``.
    """
    if not modules:
        raise TypeError("join() takes the models that are trained in the loop, and got none.")
    check_flag("divide_by_initial_world_size", divide_by_initial_world_size)
    check_flag("throw_on_early_termination", throw_on_early_termination)
    engines = [*dict.fromkeys(engine for module in modules for engine in state_of(module).engines)]
    groups = [engine.process_group for engine in engines]
    group = next((group for group in groups if group.size() > 1), None)
    if group is None:
        return nullcontext()
    return UnevenLoop(
        engines,
        group,
        divide_by_active=not divide_by_initial_world_size,
        throws=throw_on_early_termination,
    )


def sync_buffers(module: nn.Module) -> None:
    """Replace buffers whose policy is "late" by their mean over the ranks.

    Call it before you evaluate or save. Every rank must call it; it blocks.

    Args:
        module: A module that was given to :func:`parallelize`, a wrapper, or the module in one.

    Raises:
        ModelError: If ``module`` isn't parallel.
    """
    for engine in state_of(module).engines:
        finish_failed(engine.process_group)
        engine.buffers.start(late=True)()


def attach(
    owner: nn.Module,
    module: nn.Module,
    group: dist.ProcessGroup | None,
    options: Options,
    *,
    is_copy: bool = False,
) -> None:
    """Keep ``module`` in step with its replicas for as long as ``owner`` lives.

    Every rank must call it; of a copy of a parallel model, only the ranks that train the copy.
    Parts that are parallel already, over this group or another, stay as they are. ``owner`` is
    ``module`` itself, or a wrapper, which takes the place of one that it is in already.

    Raises:
        ModelError: If the module can't be made parallel, on this rank or on another.
    """
    group = group if group is not None and group.size() > 1 else None
    inner = {part: state for part in module.modules() if (state := find_state(part)) is not None}
    previous = find_state_around(module) if owner is not module else None
    refusal = _refusal(owner, module, group, options, [previous, *inner.values()])
    engines = previous.engines if previous is not None else []
    for one in filter(None, [group, *(engine.process_group for engine in engines)]):
        finish_failed(one)
    if group is not None and options.init_sync and not is_copy:
        left_alone = options.left_alone(module)
        # Also with a refusal, which it raises: the other ranks would wait for this one.
        check_same_model(module, group, options._asdict(), refusal, left_alone)
        named = [*module.named_parameters(), *module.named_buffers()]
        broadcast_tensors(group, [t.detach() for name, t in named if name not in left_alone])
    elif refusal is not None:
        raise refusal
    if group is not None and torch.__future__.get_swap_module_params_on_conversion():
        _log.warning(
            "torch.__future__.set_swap_module_params_on_conversion(True) is on: with it, torch "
            'refuses to convert this %s ("Couldn\'t swap") for as long as it is parallel. Convert '
            "it to its dtype and device before you make it parallel.",
            type(module).__name__,
        )
    own: list[Engine] = []
    if group is not None:
        engine = backward_sync_of(group).new_engine(module, options, inner, is_copy=is_copy)
        if engine.parameters:
            own.append(engine)
            watch(engine)
    inner_engines = [engine for state in inner.values() for engine in state.engines]
    state = ParallelState(module, [*inner_engines, *own], is_wrapped=owner is not module)
    set_state(owner, state, previous)
    _replace([engine for engine in engines if engine not in inner_engines], own)
    others = [other.parameters for other in all_states()]
    for parameter in module.parameters():
        if parameter.requires_grad and not any(parameter in known for known in others):
            state.parameters[parameter] = None


def release(wrapper: nn.Module) -> None:
    """Make the model in ``wrapper`` parallel no more: gradients stay this rank's own."""
    state = state_of(wrapper)
    for engine in state.engines:
        finish_failed(engine.process_group)
    _replace(list(state.engines), ())
    state.parameters.clear()


def _replace(engines: Collection[Engine], replacements: Sequence[Engine]) -> None:
    """Stop ``engines``, and put ``replacements`` in their place in all states that list them."""
    for engine in engines:
        backward_sync_of(engine.process_group).remove(engine)
        unwatch(engine)
    for state in all_states():
        kept = [engine for engine in state.engines if engine not in engines]
        if len(kept) < len(state.engines):
            state.engines[:] = [*kept, *replacements]


def check_bucket_cap(bucket_cap_mb: float, name: str = "bucket_cap_mb") -> None:
    """Raise ValueError unless ``bucket_cap_mb`` is a positive number of MiB."""
    if not isinstance(bucket_cap_mb, int | float) or not 0 < bucket_cap_mb < 2**40:
        raise ValueError(f"{name} is {bucket_cap_mb!r}, but must be a number of MiB, more than 0.")


def _refusal(
    owner: nn.Module,
    module: nn.Module,
    group: dist.ProcessGroup | None,
    options: Options,
    known: Collection[ParallelState | None],
) -> ModelError | None:
    """Return why ``module`` can't be made parallel; parameters of ``known`` states may be in it."""
    kind = type(module).__name__
    if find_state(owner) is not None:
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
    trained = False
    others = [state.parameters for state in all_states() if state not in known]
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
        if any(parameter in theirs for theirs in others):
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
    dynamo = sys.modules.get("torch._dynamo")
    compiles = dynamo is not None and dynamo.config.compiled_autograd
    if compiles and group is not None and group.name() == "threads":  # torch would crash
        return ModelError(
            "torch._dynamo.config.compiled_autograd is on. It runs one backward at a time in a "
            "process, and here each rank is a thread, whose backward waits for those of the "
            "others. Let ranks be processes, or leave it off."
        )
    return None
