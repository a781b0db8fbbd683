"""Gradients: their assignment to buckets, and the reduction of those."""

from lockstep.grad.bucket import MIB, assign_buckets, gradient_dtype
from lockstep.grad.comm_hook import CommHook, GradBucket, view_like
from lockstep.grad.reducer import Phase, Reducer

__all__ = [
    "MIB",
    "CommHook",
    "GradBucket",
    "Phase",
    "Reducer",
    "assign_buckets",
    "gradient_dtype",
    "view_like",
]
