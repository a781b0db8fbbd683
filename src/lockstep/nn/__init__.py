"""Modules whose replicas stay in step, and the means that they are trained on."""

from lockstep.nn.backward import finish_failed
from lockstep.nn.distributed import DistributedDataParallel
from lockstep.nn.mean import average_gradients, mean
from lockstep.nn.parallel_state import (
    defer_gradients,
    groups_of,
    is_parallel,
    parallel_modules,
    state_of,
)
from lockstep.nn.parallelize import accumulate, join, no_sync, parallelize, sync_buffers
from lockstep.nn.replicas import (
    DataParallel,
    data_parallel,
    gather,
    parallel_apply,
    replicate,
    scatter,
    scatter_kwargs,
)
from lockstep.nn.sync_batch_norm import SyncBatchNorm

__all__ = [
    "DataParallel",
    "DistributedDataParallel",
    "SyncBatchNorm",
    "accumulate",
    "average_gradients",
    "data_parallel",
    "defer_gradients",
    "finish_failed",
    "gather",
    "groups_of",
    "is_parallel",
    "join",
    "mean",
    "no_sync",
    "parallel_apply",
    "parallel_modules",
    "parallelize",
    "replicate",
    "scatter",
    "scatter_kwargs",
    "state_of",
    "sync_buffers",
]
