"""Data parallelism in one process: its four primitives, and the module that is made of them."""

from lockstep.nn.replicas.apply import parallel_apply
from lockstep.nn.replicas.data_parallel import DataParallel, data_parallel
from lockstep.nn.replicas.gather import gather
from lockstep.nn.replicas.replicate import replicate
from lockstep.nn.replicas.scatter import scatter, scatter_kwargs

__all__ = [
    "DataParallel",
    "data_parallel",
    "gather",
    "parallel_apply",
    "replicate",
    "scatter",
    "scatter_kwargs",
]
