"""Modules whose replicas stay in step."""

from lockstep.nn.backward import finish_failed
from lockstep.nn.distributed import DistributedDataParallel
from lockstep.nn.engine import with_sparse_gradients
from lockstep.nn.mean import mean
from lockstep.nn.micro_batches import accumulate
from lockstep.nn.parallelize import join, no_sync, parallelize, sync_buffers
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
from lockstep.nn.verify import check_same_model

__all__ = [
    "DataParallel",
    "DistributedDataParallel",
    "SyncBatchNorm",
    "accumulate",
    "check_same_model",
    "data_parallel",
    "finish_failed",
    "gather",
    "join",
    "mean",
    "no_sync",
    "parallel_apply",
    "parallelize",
    "replicate",
    "scatter",
    "scatter_kwargs",
    "sync_buffers",
    "with_sparse_gradients",
]
