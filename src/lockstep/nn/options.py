"""How the replicas of a module are kept in step."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from torch import nn

from lockstep.grad import MIB
from lockstep.nn.buffers import BroadcastBuffers, policy_of


class Options(NamedTuple):
    """How the replicas of a module are kept in step; the same on every rank."""

    # The size from which a bucket is full, in MiB, or those of the first buckets.
    bucket_cap_mb: float | tuple[float, ...]
    broadcast_buffers: BroadcastBuffers
    init_sync: bool = True  # whether to compare the models and start from rank 0's values
    ignored: Collection[str] = ()  # names of parameters and buffers that each rank has for itself
    skip_unused: bool = False  # whether buckets are not sent if no rank uses their parameters
    init_buffers: bool = False  # whether "local" buffers start from rank 0's values too

    @property
    def cap_bytes(self) -> int | list[int]:
        """The size from which a bucket is full, in bytes, or those of the first buckets."""
        cap = self.bucket_cap_mb
        return [int(mb * MIB) for mb in cap] if isinstance(cap, tuple) else int(cap * MIB)

    def left_alone(self, module: nn.Module) -> set[str]:
        """Return the names of parameters and buffers that don't start from rank 0's values."""
        names = [] if self.init_buffers else [name for name, _ in module.named_buffers()]
        local = {name for name in names if policy_of(name, self.broadcast_buffers) == "local"}
        return {*self.ignored, *local}
