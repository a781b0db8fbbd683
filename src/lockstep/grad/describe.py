"""What a reducer's buckets are, for those who show it."""

from __future__ import annotations

from typing import NamedTuple

from lockstep.comm import SharedBuffers
from lockstep.grad.arrangement import alignment_of
from lockstep.grad.deferred import DeferredBucket
from lockstep.grad.facts import num_facts
from lockstep.grad.memory import ALIGNMENT, aligned, gradient_dtype
from lockstep.grad.reducer import Reducer
from lockstep.grad.row_bucket import RowBucket


class DescribedBucket(NamedTuple):
    """A bucket, or one that the first backward will have."""

    parameter_names: list[str]
    gradient_bytes: int
    sent_bytes: int  # with facts, and what aligns gradients
    is_deferred: bool
    is_by_rows: bool = False  # then ``sent_bytes`` are those of the last backward


def describe_buckets(reducer: Reducer) -> list[DescribedBucket]:
    """Return the buckets in the order in which they are launched."""
    if reducer._buckets:
        return [
            DescribedBucket(
                bucket.contents.parameter_names,
                sum(view.nbytes for view in bucket.contents.memory.views),
                bucket.num_bytes,
                bucket.is_deferred,
                isinstance(bucket, RowBucket),
            )
            for bucket in reducer._buckets
        ]
    assignment = reducer.assigned_for(reducer.table.order)
    found = []
    for number, (group, kind) in enumerate(assignment, 1):
        named = [reducer.table.named[index] for index in group]
        _, first = (named or reducer.table.named)[0]
        dtype = gradient_dtype(first)
        num_parameters = len(reducer.table.named) if number == len(assignment) else 0
        sizes = [parameter.numel() for _, parameter in named]
        alignment = ALIGNMENT if kind else alignment_of(first, reducer.comm_hook)
        numel = sum(aligned(size, alignment) for size in sizes)
        if num_parameters and reducer.comm_hook is None:  # which gets nothing but gradients
            numel += num_facts(num_parameters)
        if kind is DeferredBucket:
            numel = SharedBuffers.numel_with_note(numel, dtype)
        names, num_bytes = [name for name, _ in named], sum(sizes) * dtype.itemsize
        found.append(DescribedBucket(names, num_bytes, numel * dtype.itemsize, kind is not None))
    return found
