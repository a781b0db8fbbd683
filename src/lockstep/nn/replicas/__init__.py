"""``DataParallel``, and the four primitives: scatter, replicate, parallel_apply and gather."""

from lockstep.nn.replicas.data_parallel import DataParallel, data_parallel
from lockstep.nn.replicas.group import parallel_apply, refuse_in_replica
from lockstep.nn.replicas.module_copy import replicate
from lockstep.nn.replicas.scatter_gather import gather, scatter, scatter_kwargs

__all__ = [
    "DataParallel",
    "data_parallel",
    "gather",
    "parallel_apply",
    "refuse_in_replica",
    "replicate",
    "scatter",
    "scatter_kwargs",
]
