"""Communication between ranks, always through a process group that is passed in."""

from lockstep.comm.exchange import (
    TensorBroadcast,
    all_gather,
    all_gather_bytes,
    broadcast_tensors,
    can_average,
    start_all_reduce,
    zero_buffer,
)

__all__ = [
    "TensorBroadcast",
    "all_gather",
    "all_gather_bytes",
    "broadcast_tensors",
    "can_average",
    "start_all_reduce",
    "zero_buffer",
]
