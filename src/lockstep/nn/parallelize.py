"""``parallelize(model)``: the same object, kept in step with its replicas on other ranks."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Never, TypeVar

import torch.distributed as dist
from torch import nn

from lockstep.arguments import check_flag, check_module
from lockstep.comm import this_thread
from lockstep.nn.backward import finish_failed
from lockstep.nn.buffers import BroadcastBuffers, check_policies
from lockstep.nn.join import UnevenLoop
from lockstep.nn.options import Options
from lockstep.nn.parallel_state import attach, state_of
from lockstep.nn.shard import refuse_in_shard
from lockstep.world import group_or_all

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
    """Keep ``module`` in step with its replicas on the other ranks, in place. ::

        model = lockstep.parallelize(Net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        criterion(model(x), y).backward()
        optimizer.step()

    It stays the same object of the same class, with the same methods, attributes and
    ``state_dict`` keys. From now on a ``backward()`` leaves in ``.grad`` the mean over all
    ranks, whichever method computed the loss. A rank that didn't use a parameter counts as zero in
    the mean; a parameter that no rank used keeps its ``.grad``, None included.

    Every rank must call it with the same model, and then run backwards in the same order. On
    one rank it changes nothing.

    Parameters may be frozen, unfrozen, replaced and added later, on every rank alike: new ones
    start from rank 0's values at the next forward. (A parameter that is unfrozen only for backwards
    under :func:`no_sync`, and frozen again before the one that reduces, keeps this rank's
    gradient.) Parts that are parallel already, over these ranks or others (an expert over some of
    them, say), keep their own options.

    Hooks of ``register_post_accumulate_grad_hook()``, such as optimizers that step in them, see the
    mean over the ranks, and run on every rank when it is computed; in backwards that reduce
    nothing, as under :func:`no_sync`, they run at once.

    ``torch.autograd.grad()`` fills no ``.grad`` and so reduces nothing: it returns this rank's own
    gradients. With ``backward(create_graph=True)`` the reduced gradients have no graph; to
    differentiate gradients, take them with ``autograd.grad()``, compute a loss from them, and run
    its ``backward()``, whose gradients are reduced.

    Args:
        module: The model, already on its device and with its final dtypes. All ranks take rank 0's
            parameters and buffers.
        process_group: The ranks to keep in step; by default all of ``lockstep.init()``. Where two
            groups have GPUs in common, the later one's gradients are sent when backward is over, as
            NCCL may deadlock if ranks launch collectives of two groups in different orders.
        bucket_cap_mb: The size of a full bucket, in MiB. Gradients are sent in buckets, each as
            soon as it is full, while backward computes further gradients.
        broadcast_buffers: Whether buffers (BatchNorm's statistics) follow rank 0's, with each
            backward that reduces gradients. Or a dict with a policy for each pattern of names, such
            as ``{"*.running_*": "mean"}``. The policies are ``"rank0"``; ``"mean"``, the mean over
            the ranks, and rank 0's values of integers; ``"late"``, the same mean, but only when
            :func:`sync_buffers` is called, which saves the exchange in each step; and ``"local"``:
            each rank keeps its own. The first pattern that matches counts; if none does, "rank0".
        init_sync: Whether to check that all ranks have the same model and to give them rank 0's
            values. Without it, that is up to you.

    Returns:
        ``module`` itself.

    Raises:
        ModelMismatch: If the ranks' models or options differ; it names the first difference.
        NothingToTrain: If no parameter requires a gradient.
        AlreadyParallel: If it is parallel already, through torch too (FSDP, DTensors), or shares
            parameters with a model that is.
        TypeError: If an argument is of a wrong type, or unknown; for arguments of torch's
            DistributedDataParallel it says what to do instead.
        ValueError: If ``bucket_cap_mb`` is no size, or a policy is none of those above.
    """
    if others:
        raise TypeError(_others_are_refused(others))
    refuse_in_shard("A model is made parallel")
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
        taken = ", ".join(inspect.signature(parallelize).parameters)
        return f"parallelize() got {', '.join(names)}, and takes {taken.removesuffix(', others')}."
    return (
        f"parallelize() takes no {', '.join(names)}, which torch's DistributedDataParallel does. "
        "What these say of the graph, of unused parameters and of views isn't needed here: leave "
        "them out. lockstep.DistributedDataParallel(model, ...) takes all of torch's arguments."
    )


def no_sync(module: nn.Module) -> AbstractContextManager[None]:
    """Let backwards add up gradients on each rank; the first one after the context reduces them. ::

        with lockstep.no_sync(model):
            criterion(model(x), y).backward()
        criterion(model(more_x), more_y).backward()

    This applies to each ``backward()`` within the context, wherever its ``forward()`` ran.

    Args:
        module: A module that was given to :func:`parallelize`, a wrapper, or the module in one.
            Parallel parts of it accumulate too.

    Raises:
        ModelError: If ``module`` isn't parallel.
    """
    return state_of(module).no_sync()


@contextlib.contextmanager
def accumulate(module: nn.Module) -> Iterator[None]:
    """Let backwards add up gradients on each rank; the first one after the context reduces them.

    This applies to each ``backward()`` within the context, wherever its ``forward()`` ran. With
    :func:`lockstep.mean`, gradients become those of the mean over all micro-batches of the step,
    the one after the context included; without it they add up, as in torch. ::

        for number, (x, y) in enumerate(micro_batches, start=1):
            last = number == len(micro_batches)
            with contextlib.nullcontext() if last else lockstep.accumulate(model):
                lockstep.mean(criterion(model(x), y), weight=len(x)).backward()
        optimizer.step()
        optimizer.zero_grad()

    So don't divide the loss by the number of micro-batches, as other trainers want it: with
    :func:`lockstep.mean` its gradients would be as many times too small. (Losses that aren't from
    it do add up, and are to be divided.) On the CPU a warning says so, from three micro-batches on.

    Each backward of a mean is a micro-batch: it scales the existing gradients, whatever their
    origin. To give up an unfinished batch, call ``zero_grad()``, which sets gradients to None.

    Args:
        module: A module that was given to :func:`lockstep.parallelize`, a wrapper, or the module
            in a wrapper. Its parallel parts accumulate too.

    Raises:
        ModelError: If ``module`` isn't parallel.
    """
    state = state_of(module)
    with state.no_sync():
        state.rank = this_thread()
        state.num_contexts += 1
        try:
            yield
        except BaseException:
            state.count = None  # gives up the batch
            raise
        finally:
            state.num_contexts -= 1


def join(
    *modules: nn.Module,
    divide_by_initial_world_size: bool = True,
    throw_on_early_termination: bool = False,
) -> AbstractContextManager[None]:
    """Let ranks leave a training loop at different times.

    A rank that leaves the loop goes on taking part in the reductions of the others, to which it
    adds nothing, until all have left it; then all ranks take the models of the last one.
    SyncBatchNorm and :func:`lockstep.mean` may be in the loop. Every rank must call it. ::

        with lockstep.join(model):
            for x, y in batches:  # any number of batches on each rank, none included
                ...

    Args:
        modules: All models that are trained in the loop. Each was given to :func:`parallelize`, is
            a wrapper, or is the module in one; they are parallel over the same ranks.
        divide_by_initial_world_size: Whether gradients are divided by the number of all ranks, or
            else by the number of ranks that still have data.
        throw_on_early_termination: Whether the first rank that leaves the loop ends it on every
            rank, with a RuntimeError.

    Raises:
        ModelError: If a model isn't parallel, or is parallel over other ranks than the first.
        TypeError: If no model is given.

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

    Ranks also take over the rows of embeddings that lookups with ``max_norm`` have scaled on any of
    them since the last backward, as they do at the end of each backward.

    Call it before you evaluate or save. Every rank must call it; it blocks. ::

        model = lockstep.parallelize(Net(), broadcast_buffers={"*.running_*": "late"})
        train(model)
        lockstep.sync_buffers(model)
        evaluate(model)

    Args:
        module: A module that was given to :func:`parallelize`, a wrapper, or the module in one.

    Raises:
        ModelError: If ``module`` isn't parallel.
    """
    for engine in state_of(module).engines:
        finish_failed(engine.process_group)
        engine.buffers.start(late=True)()
        engine.exchange_renormed()


def check_bucket_cap(bucket_cap_mb: float, name: str = "bucket_cap_mb") -> None:
    """Raise ValueError unless ``bucket_cap_mb`` is a positive number of MiB."""
    if not isinstance(bucket_cap_mb, int | float) or not 0 < bucket_cap_mb < 2**40:
        raise ValueError(f"{name} is {bucket_cap_mb!r}, but must be a number of MiB, more than 0.")
