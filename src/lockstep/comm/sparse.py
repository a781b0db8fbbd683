"""All-reduce of sparse tensors: only what is there travels."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from operator import add

import torch
import torch.distributed as dist

from lockstep.comm.algorithms import Collectives
from lockstep.comm.call import Call
from lockstep.comm.hosts.collectives import HostsCollectives
from lockstep.comm.reduction import reduction_for
from lockstep.comm.work import Run


def all_reduce_sparse(
    collectives_for: Callable[[Call, float], Collectives | HostsCollectives],
    size: int,
    tensor: torch.Tensor,
    op: dist.ReduceOp | dist.ReduceOp.RedOpType,
) -> Run:
    """Sum a sparse COO tensor over the ranks, in rank order, in place.

    Ranks may hold different elements, and different numbers of them.

    Args:
        collectives_for: Makes the collectives for a call, and a timeout in seconds.
        size: How many ranks there are.
        tensor: This rank's tensor.
        op: SUM or AVG.

    Returns:
        What carries it out.

    Raises:
        TypeError: At once, if the layout is another, or ``op`` is neither SUM nor AVG.
    """
    name = reduction_for(op, tensor.dtype).name
    if tensor.layout is not torch.sparse_coo or name not in ("SUM", "AVG"):
        raise TypeError(
            f"all_reduce of a {tensor.layout} tensor by {name}: of sparse tensors it can sum or "
            "average those in COO layout. Use to_sparse_coo() or to_dense()."
        )
    call = Call("sparse all_reduce", tensor.dtype, tensor.shape, name)
    return lambda timeout: _sum_up(collectives_for(call, timeout), size, tensor, name)


def _sum_up(
    collectives: Collectives | HostsCollectives, size: int, tensor: torch.Tensor, name: str
) -> None:
    mine = tensor.data.coalesce()
    indices, values = mine.indices(), mine.values()
    count = torch.tensor([values.shape[0]], device="cpu")
    counts = torch.empty(size, dtype=torch.int64, device="cpu")
    collectives.all_gather(counts.split(1), count)
    all_indices = [indices.new_empty(len(indices), n) for n in counts.tolist()]
    all_values = [values.new_empty(n, *values.shape[1:]) for n in counts.tolist()]
    collectives.all_gather_uneven(
        [part.view(-1) for part in all_indices], indices.contiguous().view(-1)
    )
    collectives.all_gather_uneven(
        [part.view(-1) for part in all_values], values.contiguous().view(-1)
    )
    # Two at a time: how more than two values for one place are associated is not ours to say.
    total = reduce(
        add,
        (
            torch.sparse_coo_tensor(i, v, tensor.shape, is_coalesced=True, check_invariants=False)
            for i, v in zip(all_indices, all_values, strict=True)
        ),
    ).coalesce()
    if name == "AVG":
        total = total / size
    # Not through `.data`, which has indices and values of its own; and what is copied is to be
    # an ordinary tensor, although this runs in inference mode.
    with torch.inference_mode(False), torch.no_grad():
        tensor.copy_(total)
