"""Gradients: which of them travel together, and their way through the all-reduce."""

from lockstep.grad.assignment import MIB, assign_buckets
from lockstep.grad.bucket import Bucket
from lockstep.grad.comm_hook import CommHook, GradBucket
from lockstep.grad.launch_order import LaunchOrder
from lockstep.grad.ready_state import TOUCHED_EARLIER
from lockstep.grad.reducer import Phase, Reducer
from lockstep.grad.sparse import SparseGradient
from lockstep.grad.views import gradient_dtype

__all__ = [
    "MIB",
    "TOUCHED_EARLIER",
    "Bucket",
    "CommHook",
    "GradBucket",
    "LaunchOrder",
    "Phase",
    "Reducer",
    "SparseGradient",
    "assign_buckets",
    "gradient_dtype",
]
