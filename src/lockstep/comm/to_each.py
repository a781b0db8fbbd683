"""From each rank to each: parts of one tensor, over any group."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from lockstep.comm.any_group import Started


def all_to_all(
    group: ProcessGroup,
    received: torch.Tensor,
    incoming: Sequence[int],
    sent: torch.Tensor,
    outgoing: Sequence[int],
) -> None:
    """Send part ``r`` of ``sent`` to rank ``r``, and receive one of each rank, in rank order.

    Every rank must call it; it blocks. Both tensors have one dimension; ``incoming`` and
    ``outgoing`` are the sizes of their parts.
    """
    options = dist.AllToAllOptions()
    start = partial(group.alltoall_base, received, sent, [*incoming], [*outgoing], options)
    Started(group, "all_to_all", start, sent.nbytes).wait()
