"""Which gradients share a bucket."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

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
