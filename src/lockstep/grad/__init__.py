"""Gradients: which of them travel together, and their way through the all-reduce."""

from lockstep.grad.assignment import MIB, assign_buckets
from lockstep.grad.bucket import Bucket
from lockstep.grad.reducer import Phase, Reducer

__all__ = ["MIB", "Bucket", "Phase", "Reducer", "assign_buckets"]
