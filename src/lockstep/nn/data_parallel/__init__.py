"""Data parallelism in one process: its four primitives, and the module that is made of them."""

from lockstep.nn.data_parallel.apply import parallel_apply
from lockstep.nn.data_parallel.gather import gather
from lockstep.nn.data_parallel.module import DataParallel, data_parallel
from lockstep.nn.data_parallel.replicate import replicate
from lockstep.nn.data_parallel.scatter import scatter, scatter_kwargs

__all__ = [
    "DataParallel",
    "data_parallel",
    "gather",
    "parallel_apply",
    "replicate",
    "scatter",
    "scatter_kwargs",
]
