"""Gradients: how they are assigned to buckets, and how buckets are reduced over the ranks."""

from lockstep.grad.arrangement import MIB, assign_buckets
from lockstep.grad.bucket import without_autograd
from lockstep.grad.comm_hook import CommHook, GradBucket, view_like
from lockstep.grad.contents import Contents
from lockstep.grad.deferred import DeferredBucket
from lockstep.grad.describe import DescribedBucket, describe_buckets
from lockstep.grad.diagnostics import failed_before
from lockstep.grad.facts import WhoTold
from lockstep.grad.memory import aligned, gradient_dtype
from lockstep.grad.one_pass import Phase
from lockstep.grad.reducer import Reducer
from lockstep.grad.row_gradient import RowGradient
from lockstep.grad.scattered import ScatteredBucket
from lockstep.grad.unsummed import (
    DeferredParameter,
    UnsummedBucket,
    bucket_of,
    lacks_gradient,
    name_of,
    part_of_gradient,
    unsummed_bucket_of,
)
from lockstep.torch_private import gradient_of, set_gradient

__all__ = [
    "MIB",
    "CommHook",
    "Contents",
    "DeferredBucket",
    "DeferredParameter",
    "DescribedBucket",
    "GradBucket",
    "Phase",
    "Reducer",
    "RowGradient",
    "ScatteredBucket",
    "UnsummedBucket",
    "WhoTold",
    "aligned",
    "assign_buckets",
    "bucket_of",
    "describe_buckets",
    "failed_before",
    "gradient_dtype",
    "gradient_of",
    "lacks_gradient",
    "name_of",
    "part_of_gradient",
    "set_gradient",
    "unsummed_bucket_of",
    "view_like",
    "without_autograd",
]
