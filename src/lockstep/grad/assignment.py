"""Which gradients share a bucket: a pure function from sizes to indices."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

# The first bucket is smaller: the sooner it is full, the sooner something travels.
FIRST_BUCKET_BYTES = 1024 * 1024
MIB = 1024 * 1024
# Where all gradients, of whatever kind, are smaller than so many first buckets, another all-reduce
# takes longer over Gloo than it hides, and as long over shared memory. See "Steps" in
# benchmarks/RESULTS.md.
_FEWEST_FIRST_BUCKETS = 4


def assign_buckets(
    num_bytes: Sequence[int],
    kinds: Sequence[Hashable],
    order: Sequence[int],
    *,
    cap_bytes: int,
    first_cap_bytes: int = FIRST_BUCKET_BYTES,
) -> list[list[int]]:
    """Divide gradients into buckets, in the order in which they become ready.

    A bucket holds one kind (say, one dtype and device), and is full with the gradient that takes
    it to its cap: to wait for one that doesn't fit would only delay those that are there.
    Buckets are sorted by when their last gradient is ready, as they are launched in index order
    and each would hold up those after it.

    Args:
        num_bytes: The size of each gradient.
        kinds: The kind of each gradient; only equal kinds share a bucket.
        order: The indices of all gradients, in the order in which they become ready.
        cap_bytes: How much makes a bucket full.
        first_cap_bytes: How much makes the first one full, if it is not a large part of all.

    Returns:
        The indices of each bucket's gradients. Every index is in exactly one bucket.
    """
    if sum(num_bytes[index] for index in order) < _FEWEST_FIRST_BUCKETS * first_cap_bytes:
        first_cap_bytes = cap_bytes
    full: list[list[int]] = []
    filling: dict[Hashable, list[int]] = {}
    filled_bytes: dict[Hashable, int] = {}
    for index in order:
        kind, size = kinds[index], num_bytes[index]
        if kind not in filling:
            filling[kind], filled_bytes[kind] = [], 0
        filling[kind].append(index)
        filled_bytes[kind] += size
        if filled_bytes[kind] >= (cap_bytes if full else min(first_cap_bytes, cap_bytes)):
            full.append(filling.pop(kind))
    position = {index: place for place, index in enumerate(order)}
    return sorted(full + list(filling.values()), key=lambda bucket: position[bucket[-1]])
