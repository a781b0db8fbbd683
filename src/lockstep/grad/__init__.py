"""Gradients: their assignment to buckets, and the reduction of those."""

from lockstep.grad.assign import MIB, assign_buckets, gradient_dtype
from lockstep.grad.bucket import Bucket
from lockstep.grad.comm_hook import CommHook, GradBucket
from lockstep.grad.reducer import Phase, Reducer
from lockstep.grad.sparse import reduce_sparse

__all__ = [
    "MIB",
    "Bucket",
    "CommHook",
    "GradBucket",
    "Phase",
    "Reducer",
    "assign_buckets",
    "gradient_dtype",
    "reduce_sparse",
]
