"""Communication between ranks, always through a process group that is passed in."""

from lockstep.comm.deadline import Deadline
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
from lockstep.comm.join_state import (
    Announcement,
    JoinState,
    Step,
    gather_in_step,
    join_state_of,
    mean_divisor,
    set_join_state,
    sum_in_step,
)
from lockstep.comm.single_rank import SingleRankGroup

__all__ = [
    "Announcement",
    "Deadline",
    "JoinState",
    "Pending",
    "SingleRankGroup",
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
    "join_state_of",
    "mean_divisor",
    "set_join_state",
    "start_all_reduce",
    "sum_in_step",
    "sum_rows",
    "without_repeats",
    "zero_buffer",
]
