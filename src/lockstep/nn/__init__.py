"""Modules whose replicas stay in step."""

from lockstep.nn.distributed import DistributedDataParallel
from lockstep.nn.parallelize import no_sync, parallelize, sync_buffers
from lockstep.nn.sync_batch_norm import SyncBatchNorm

__all__ = ["DistributedDataParallel", "SyncBatchNorm", "no_sync", "parallelize", "sync_buffers"]
