"""One clock for all ranks: by how much the clocks of several hosts differ."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from lockstep.comm import all_gather, device_of_facts
from lockstep.spans import now

_NUM_ROUNDS = 20


class Offset(NamedTuple):
    """What to add to this rank's times to get rank 0's, in nanoseconds; exact within a bound."""

    offset: int
    bound: int


def boot_id() -> str:
    """Return what processes have in common whose clocks are the same; "" if that isn't known."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/time')}"
    return ""


def measure_offset(group: dist.ProcessGroup) -> Offset:
    """Return the offset of this rank. Every rank calls it; it blocks.

    In each round all ranks note the time, meet, and note it again. Nobody leaves before the last
    has come. So, on one clock, each rank's time of leaving is after every other's of coming, which
    bounds the offset from both sides; it lies within the bounds of all rounds.

    Source: David Mills, "Internet Time Synchronization" (1991); this is its symmetric form.
    """
    device = device_of_facts(group)
    lowest, highest = [-(2**62)] * group.size(), [2**62] * group.size()
    came = left = 0
    for number in range(_NUM_ROUNDS + 1):
        before = [came, left]
        came = now()
        times = all_gather(group, torch.tensor(before, dtype=torch.int64, device=device))
        left = now()
        if number:  # they are those of the round before
            by_rank = torch.stack(times).tolist()
            came_first, left_first = by_rank[0]
            for rank, (came_there, left_there) in enumerate(by_rank):
                lowest[rank] = max(lowest[rank], came_first - left_there)
                highest[rank] = min(highest[rank], left_first - came_there)
    low, high = lowest[group.rank()], highest[group.rank()]
    return Offset((low + high) // 2, (high - low + 1) // 2)
