"""Which gradients share a bucket, for the order in which they become ready."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Hashable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from lockstep.grad.bucket import Bucket, HookedBucket
from lockstep.grad.comm_hook import CommHook
from lockstep.grad.contents import Contents
from lockstep.grad.facts import num_facts
from lockstep.grad.memory import gradient_dtype, line_numel
from lockstep.grad.row_bucket import RowBucket
from lockstep.grad.table import GradientTable
from lockstep.grad.unsummed import UnsummedBucket

MIB = 1024 * 1024
# The first bucket is smaller: the sooner it is full, the sooner communication starts.
FIRST_BUCKET_BYTES = MIB
# If everything fits into four first buckets, don't split: another all-reduce costs more over Gloo
# than it hides, and as much over shared memory. See "Steps" in benchmarks/RESULTS.md.
_MIN_FIRST_BUCKETS = 4


def assign_buckets(
    num_bytes: Sequence[int],
    kinds: Sequence[Hashable],
    order: Sequence[int],
    *,
    cap_bytes: int | Sequence[int],
    first_cap_bytes: int = FIRST_BUCKET_BYTES,
) -> list[list[int]]:
    """Divide gradients into buckets, in the order in which they become ready.

    A bucket holds gradients of one kind (say, one dtype and device), and is full with the gradient
    that takes it to its cap: waiting for one that fits would delay those that are ready.
    Buckets are sorted by when their last gradient is ready: they launch in index order, and an
    unfilled bucket holds up all later ones.

    Args:
        num_bytes: The size of each gradient.
        kinds: The kind of each gradient; only equal kinds share a bucket.
        order: The indices of all gradients, in the order in which they become ready.
        cap_bytes: The size from which a bucket is full. Several are those of the first bucket to be
            full, the second, and so on; the last of them is that of all that follow.
        first_cap_bytes: The size of the first bucket instead of one ``cap_bytes``, unless that is
            a large part of all gradients.

    Returns:
        The indices of each bucket's gradients. Every index is in exactly one bucket.
    """
    if isinstance(cap_bytes, int):
        is_little = sum(num_bytes[index] for index in order) < _MIN_FIRST_BUCKETS * first_cap_bytes
        cap_bytes = [cap_bytes if is_little else min(first_cap_bytes, cap_bytes), cap_bytes]
    full: list[list[int]] = []
    filling: dict[Hashable, list[int]] = {}
    filled_bytes: dict[Hashable, int] = {}
    for index in order:
        kind, size = kinds[index], num_bytes[index]
        if kind not in filling:
            filling[kind], filled_bytes[kind] = [], 0
        filling[kind].append(index)
        filled_bytes[kind] += size
        if filled_bytes[kind] >= cap_bytes[min(len(full), len(cap_bytes) - 1)]:
            full.append(filling.pop(kind))
    position = {index: number for number, index in enumerate(order)}
    return sorted(full + list(filling.values()), key=lambda bucket: position[bucket[-1]])


class Assigned(NamedTuple):
    """A bucket to be made."""

    indices: Sequence[int]  # of its parameters
    # The class of a bucket whose gradients stay unsummed, or travel by rows.
    kind: type[UnsummedBucket | RowBucket] | None


def assigned_for(
    table: GradientTable,
    order: Sequence[int],
    runs: Sequence[Assigned],
    tables: Collection[int],
    *,
    cap_bytes: int | Sequence[int],
    first_cap_bytes: int,
) -> list[Assigned]:
    """Return the buckets to make for gradients that become ready in ``order``.

    Those of unsummed ``runs`` have buckets of their own, and so has each of the other ``tables``.
    Sparse gradients have none.
    """
    unsummed = {*itertools.chain(*(run.indices for run in runs))}
    rows = [Assigned([index], RowBucket) for index in order if index in {*tables} - unsummed]
    apart = {
        *unsummed,
        *itertools.chain(*(run.indices for run in rows)),
        *table.order[table.sparse.start :],
    }
    parameters = [parameter for _, parameter in table.named]
    groups = assign_buckets(
        [p.numel() * gradient_dtype(p).itemsize for p in parameters],
        [(gradient_dtype(p), p.device) for p in parameters],
        [index for index in order if index not in apart],
        cap_bytes=cap_bytes,
        first_cap_bytes=first_cap_bytes,
    )
    # The last bucket can carry facts; it may be there for the facts alone.
    last = [run for run in runs if run.kind is not None and run.kind.carries_facts]
    first = [run for run in runs if run not in last]
    others = [Assigned(group, None) for group in groups]
    others = others if others or last else [Assigned([], None)]
    # Rows go late: their ranks wait for each other. Embeddings get theirs at the end anyway.
    end = len(others) if last else -1
    return [*first, *others[:end], *rows, *others[end:], *last]


def alignment_of(parameter: torch.nn.Parameter, hook: CommHook | None) -> int:
    """Return the alignment of the gradients in a bucket with that of ``parameter``, in elements."""
    return line_numel(parameter) if hook is None else 0  # as a hook gets nothing but gradients


def make_buckets(
    table: GradientTable,
    assigned: Sequence[Assigned],
    group: dist.ProcessGroup,
    kept: Sequence[Bucket],
    *,
    hook: CommHook | None,
    is_shared: bool,
) -> list[Bucket]:
    """Return the buckets that are ``assigned``, in the order of ``table``.

    Buckets of unsummed gradients are those that are ``kept``, if there are any. If it ``is_shared``
    the memory of the others is such as ``group`` reduces in place.
    """
    buckets: list[Bucket] = []
    unsummed = iter(kept)
    for number, (indices, kind) in enumerate(assigned, 1):
        gradients = table.slice(buckets[-1].contents.stop if buckets else 0, len(indices))
        size = num_facts(len(table.named)) if number == len(assigned) else 0
        if kind is None:
            _, like = (gradients.named or table.named)[0]
            contents = Contents(
                gradients,
                tail_size=size,
                buffers_from=group if is_shared and hook is None else None,
                is_tail_apart=hook is not None,
                like=like,
                alignment=alignment_of(like, hook),
            )
            buckets.append(
                Bucket(contents, group) if hook is None else HookedBucket(contents, group, hook)
            )
        elif issubclass(kind, RowBucket):
            buckets.append(RowBucket.of(gradients, group))
        else:
            found = next(unsummed, None)
            buckets.append(found or kind.of(gradients, group, size))
    return buckets
