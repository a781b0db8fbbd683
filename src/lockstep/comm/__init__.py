"""Communication between ranks, always through a process group that is passed in."""

from lockstep.comm.alone import LoneGroup
from lockstep.comm.exchange import (
    TensorBroadcast,
    all_gather,
    all_gather_bytes,
    any_rank,
    broadcast_tensors,
    can_average,
    have_same,
    start_all_reduce,
    sum_rows,
    without_repeats,
    zero_buffer,
)
from lockstep.comm.failures import Pending, explained, global_rank, is_from_group
from lockstep.comm.roll import (
    Answer,
    Roll,
    Step,
    gather_in_step,
    num_counted,
    roll_of,
    set_roll,
    sum_in_step,
)

__all__ = [
    "Answer",
    "LoneGroup",
    "Pending",
    "Roll",
    "Step",
    "TensorBroadcast",
    "all_gather",
    "all_gather_bytes",
    "any_rank",
    "broadcast_tensors",
    "can_average",
    "explained",
    "gather_in_step",
    "global_rank",
    "have_same",
    "is_from_group",
    "num_counted",
    "roll_of",
    "set_roll",
    "start_all_reduce",
    "sum_in_step",
    "sum_rows",
    "without_repeats",
    "zero_buffer",
]
