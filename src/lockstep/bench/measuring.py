"""What each rank does: it holds a Gloo and a shm group, and lets them take turns."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import cast

import torch
import torch.distributed as dist

from lockstep.bench.contenders import contenders
from lockstep.bench.figures import Case, Outcome
from lockstep.bench.plan import Plan, format_size
from lockstep.bench.small_call import take_apart
from lockstep.bench.turns import Ranks, take_turns
from lockstep.comm.backends import SHM, register_backends
from lockstep.comm.group import SharedMemoryGroup
from lockstep.errors import SharedMemoryFull
from lockstep.world import World


class GroupRanks(Ranks):
    """The ranks of a process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.size = group.rank(), group.size()
        self._group = group

    def meet(self) -> None:
        """Wait for all of them."""
        dist.barrier(self._group)

    def slowest(self, seconds: Sequence[float]) -> list[float]:
        """Return the largest that any rank has, place by place."""
        values = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(values, dist.ReduceOp.MAX, group=self._group)
        return cast(list[float], values.tolist())


def measure(world: World, plan: Plan) -> Outcome:
    """Measure what is planned; every rank of ``world`` must call it.

    Returns:
        The same on every rank.
    """
    register_backends()
    gloo = dist.new_group(backend="gloo")
    shm = dist.new_group(backend=SHM)
    assert isinstance(gloo, dist.ProcessGroup)
    assert isinstance(shm, SharedMemoryGroup)
    ranks = GroupRanks(shm)
    outcome = Outcome([])
    for operation in plan.operations:
        for num_bytes in plan.num_bytes:
            what = f"{operation}, {ranks.size} ranks, {format_size(num_bytes)}"
            report_progress(ranks.rank, what)
            shared = _room_or_reason(num_bytes, gloo, shm)
            if isinstance(shared, str):
                outcome.skipped.append(f"{what}: {shared}")
                continue
            fighters = contenders(operation, shared, gloo, shm)
            seconds = take_turns(ranks, fighters, num_bytes, plan.rounds)
            # And with them their memory, before the next size asks for more.
            del fighters, shared
            outcome.cases.append(Case(operation, ranks.size, num_bytes, seconds))
    if "all_reduce" not in plan.operations:
        return outcome
    report_progress(ranks.rank, f"all_reduce, {ranks.size} ranks, the parts of a small call")
    return Outcome(outcome.cases, outcome.skipped, take_apart(ranks, shm, plan.rounds))


def _room_or_reason(
    num_bytes: int, gloo: dist.ProcessGroup, shm: SharedMemoryGroup
) -> torch.Tensor | str:
    """Memory that the ranks share, or why there is none: on all ranks one or the other."""
    reasons = [""] * shm.size()
    try:
        shared, reason = shm.empty(num_bytes // 4, dtype=torch.float32), ""
    except SharedMemoryFull as error:
        shared, reason = torch.empty(0), str(error)
    dist.all_gather_object(reasons, reason, group=gloo)
    return next((why for why in reasons if why), shared)


def report_progress(rank: int, what: str) -> None:
    """Say on standard error, once for all ranks, what is being measured."""
    if rank == 0:
        print(f"measuring {what}", file=sys.stderr, flush=True)
