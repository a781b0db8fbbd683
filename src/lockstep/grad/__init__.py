"""Gradients: their assignment to buckets, and the reduction of those."""

from lockstep.grad.bucket import MIB, assign_buckets, gradient_dtype
from lockstep.grad.comm_hook import CommHook, GradBucket, view_like
from lockstep.grad.deferred import (
    ALIGNMENT,
    DeferredBucket,
    DeferredParameter,
    bucket_of,
    lacks_gradient,
    pending_bucket_of,
)
from lockstep.grad.reducer import Phase, Reducer

__all__ = [
    "ALIGNMENT",
    "MIB",
    "CommHook",
    "DeferredBucket",
    "DeferredParameter",
    "GradBucket",
    "Phase",
    "Reducer",
    "assign_buckets",
    "bucket_of",
    "gradient_dtype",
    "lacks_gradient",
    "pending_bucket_of",
    "view_like",
]
