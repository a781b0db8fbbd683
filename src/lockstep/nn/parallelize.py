"""``parallelize(model)``: the same object, kept in step with its replicas on other ranks."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TypeVar

import torch.distributed as dist
from torch import nn

from lockstep.nn.attachment import Options, attach, check_bucket_cap, engine_of
from lockstep.nn.engine import accumulating
from lockstep.world import init

ModuleT = TypeVar("ModuleT", bound=nn.Module)

DEFAULT_BUCKET_CAP_MB = 25


def parallelize(
    module: ModuleT,
    *,
    process_group: dist.ProcessGroup | None = None,
    bucket_cap_mb: float = DEFAULT_BUCKET_CAP_MB,
    broadcast_buffers: bool = True,
    init_sync: bool = True,
) -> ModuleT:
    """Keep ``module`` in step with its replicas on the other ranks, in place.

    It stays the same object of the same class, with the same methods, attributes and
    ``state_dict`` keys. From now on a ``backward()`` leaves in ``.grad`` the mean over all
    ranks, whichever method computed the loss. A parameter that one rank didn't use counts as
    zero there; one that no rank used keeps its ``.grad``, None included.

    Every rank must call it with the same model, and then run backwards in the same order. On
    one rank it changes nothing.

    Args:
        module: The model, already on its device and with its final dtypes. Rank 0's parameters
            and buffers go to everyone.
        process_group: The ranks to keep in step; by default all of ``lockstep.init()``.
        bucket_cap_mb: How much makes a bucket full, in MiB. Gradients are sent in
            buckets, each when it is full, while backward computes the next ones.
        broadcast_buffers: Whether buffers (BatchNorm's statistics) follow rank 0's, with each
            backward that reduces gradients.
        init_sync: Whether to check that all ranks have the same model and to give them rank 0's
            values. Without it, that is up to you.

    Returns:
        ``module`` itself.

    Raises:
        ModelMismatch: If the ranks' models or options differ; it names the first difference.
        NothingToTrain: If no parameter requires a gradient.
        AlreadyParallel: If one of its parameters is parallel already.
    """
    check_bucket_cap(bucket_cap_mb)
    options = Options(bucket_cap_mb, broadcast_buffers, init_sync)
    attach(module, module, process_group or init().process_group, options)
    return module


def no_sync(module: nn.Module) -> AbstractContextManager[None]:
    """Let backwards add up gradients on each rank, and reduce them with the first one after.

    What counts is where ``backward()`` runs, not where ``forward()`` did.

    Args:
        module: A module that was given to :func:`parallelize`.

    Raises:
        ModelError: If ``module`` isn't parallel.
    """
    return accumulating(engine_of(module))
