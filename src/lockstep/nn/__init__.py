"""Modules whose replicas stay in step."""

from lockstep.nn.distributed import DistributedDataParallel
from lockstep.nn.parallelize import no_sync, parallelize

__all__ = ["DistributedDataParallel", "no_sync", "parallelize"]
