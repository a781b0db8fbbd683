"""Modules whose replicas stay in step, and the means that they are trained on."""

from lockstep.nn.after_backward import Call
from lockstep.nn.autograd import refuse_transforms
from lockstep.nn.backward import backward_sync_of, finish_failed
from lockstep.nn.buffers import policy_of
from lockstep.nn.distributed import DistributedDataParallel
from lockstep.nn.global_hooks import note_step, watch_steps_in_shards
from lockstep.nn.gradient_orders import expect_gradient_orders, gradient_orders
from lockstep.nn.mean import average_gradients, mean
from lockstep.nn.parallel_state import (
    TORCHS_WRAPPERS,
    ParallelState,
    are_parallel,
    defer_gradients,
    groups_of,
    parallel_modules,
    refresh_engines_of,
    state_of,
)
from lockstep.nn.parallelize import accumulate, join, no_sync, parallelize, sync_buffers
from lockstep.nn.replicas import (
    DataParallel,
    data_parallel,
    gather,
    parallel_apply,
    refuse_in_replica,
    replicate,
    scatter,
    scatter_kwargs,
)
from lockstep.nn.shard import Number, Shard, current_shard, refuse_in_shard, set_current_shard
from lockstep.nn.sync_batch_norm import SyncBatchNorm
from lockstep.nn.verify import refusal_of_divided

__all__ = [
    "TORCHS_WRAPPERS",
    "Call",
    "DataParallel",
    "DistributedDataParallel",
    "Number",
    "ParallelState",
    "Shard",
    "SyncBatchNorm",
    "accumulate",
    "are_parallel",
    "average_gradients",
    "backward_sync_of",
    "current_shard",
    "data_parallel",
    "defer_gradients",
    "expect_gradient_orders",
    "finish_failed",
    "gather",
    "gradient_orders",
    "groups_of",
    "join",
    "mean",
    "no_sync",
    "note_step",
    "parallel_apply",
    "parallel_modules",
    "parallelize",
    "policy_of",
    "refresh_engines_of",
    "refusal_of_divided",
    "refuse_in_replica",
    "refuse_in_shard",
    "refuse_transforms",
    "replicate",
    "scatter",
    "scatter_kwargs",
    "set_current_shard",
    "state_of",
    "sync_buffers",
    "watch_steps_in_shards",
]
