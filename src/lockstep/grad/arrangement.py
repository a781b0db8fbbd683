"""Which buckets there are, once it is known in which order gradients become ready."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.distributed as dist

from lockstep.comm import broadcast_tensors
from lockstep.grad.assignment import assign_buckets
from lockstep.grad.bucket import Bucket
from lockstep.grad.facts import num_facts
from lockstep.grad.ready_state import ReadyState
from lockstep.grad.views import gradient_dtype


def agreed_order(arrivals: ReadyState, group: dist.ProcessGroup) -> list[int]:
    """Rank 0's order of arrival on every rank; what it never saw comes last."""
    order = torch.tensor(arrivals.order_seen(), device=arrivals.in_order[0].device)
    broadcast_tensors(group, [order])
    return [int(index) for index in order.tolist()]


def make_buckets(
    names: Sequence[str],
    arrivals: ReadyState,
    order: Sequence[int],
    *,
    cap_bytes: int,
    first_cap_bytes: int,
    buffers_from: dist.ProcessGroup | None,
) -> list[Bucket]:
    """Buckets for gradients that become ready in ``order``, all or none: memory may be short.

    Args:
        names: What the parameters are called, by index.
        arrivals: What is known of each; positions are those in the new buckets afterwards.
        order: Indices of parameters. Those whose gradients are sparse get no bucket.
        cap_bytes: How much makes a bucket full.
        first_cap_bytes: How much makes the first one full.
        buffers_from: The group to ask for memory that it reduces in place.

    Returns:
        At least one: the last one, even if it is empty, carries facts.
    """
    parameters = dict(zip(arrivals.order, arrivals.in_order, strict=True))
    by_index = [parameters[index] for index in range(len(names))]
    dense = set(arrivals.order[: arrivals.num_dense])
    groups = assign_buckets(
        [parameter.numel() * gradient_dtype(parameter).itemsize for parameter in by_index],
        [(gradient_dtype(parameter), parameter.device) for parameter in by_index],
        [index for index in order if index in dense],
        cap_bytes=cap_bytes,
        first_cap_bytes=first_cap_bytes,
    ) or [[]]
    arrivals.rearrange(itertools.chain(*groups))
    buckets: list[Bucket] = []
    start = 0
    for group in groups:
        own = slice(start, start + len(group))
        is_last = len(buckets) == len(groups) - 1
        bucket = Bucket(
            [names[index] for index in group],
            arrivals.in_order[own],
            memoryview(arrivals.touched)[own],
            start=start,
            tail_size=num_facts(len(names)) if is_last else 0,
            buffers_from=buffers_from,
            like=arrivals.in_order[start if group else 0],
        )
        buckets.append(bucket)
        start += len(group)
    return buckets
