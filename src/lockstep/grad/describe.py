"""What a reducer's buckets are, for those who show it."""

from __future__ import annotations

from typing import NamedTuple

from lockstep.grad.bucket import gradient_dtype, num_facts
from lockstep.grad.deferred import ALIGNMENT, DeferredBucket, facts_numel
from lockstep.grad.reducer import Reducer


class BucketFacts(NamedTuple):
    """A bucket, or one that the first backward will have."""

    parameter_names: list[str]
    gradient_bytes: int
    sent_bytes: int  # with facts and, where gradients are deferred, what aligns them
    is_deferred: bool


def describe_buckets(reducer: Reducer) -> list[BucketFacts]:
    """Return the buckets in the order in which they are launched."""
    if reducer._buckets:
        return [
            BucketFacts(
                bucket.parameter_names,
                bucket.gradients.nbytes,
                bucket.num_bytes,
                isinstance(bucket, DeferredBucket),
            )
            for bucket in reducer._buckets
        ]
    groups, runs = reducer.assignment(reducer._order)
    found = []
    for number, group in enumerate(groups, 1):
        named = [reducer.named[index] for index in group]
        parameters = [parameter for _, parameter in named or reducer.named[:1]]
        is_deferred = number > len(groups) - len(runs)
        unit = ALIGNMENT if is_deferred else 1
        numel = sum(-(-max(p.numel(), unit > 1) // unit) * unit for _, p in named)
        itemsize = gradient_dtype(parameters[0]).itemsize
        is_last = number == len(groups)
        if is_deferred:
            numel += facts_numel(len(reducer.named) if is_last else 0, itemsize)
        elif is_last:
            numel += num_facts(len(reducer.named))
        own = sum(p.numel() for _, p in named) * itemsize
        found.append(BucketFacts([name for name, _ in named], own, numel * itemsize, is_deferred))
    return found
