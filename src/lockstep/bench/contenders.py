"""The ways to do a collective, and the passes over memory that none of them can do without."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from lockstep.bench.figures import BOUND, GLOO, IN_PLACE, SHM
from lockstep.bench.turns import Contender
from lockstep.comm import SharedMemoryGroup, Signature

# From here on memory decides, and the bound is measured.
BOUND_FROM_BYTES = 2**20
# What passes through a core at a time; it fits into its own cache, with every rank's part.
_BLOCK_NUMEL = 64 * 1024
_TIMEOUT_SECONDS = 300.0


def contenders(
    operation: str, shared: torch.Tensor, gloo: dist.ProcessGroup, shm: SharedMemoryGroup
) -> list[Contender]:
    """Return all that do ``operation`` on float32 tensors.

    Gloo, and shm with an ordinary tensor, work on one and the same tensor. All ranks must call it
    alike.

    Args:
        operation: Its name in ``torch.distributed``.
        shared: A flat tensor from ``shm.empty()``; the ordinary one is made as large.
        gloo: The group to compare with.
        shm: The group of the same ranks that share memory.
    """
    ordinary = torch.empty(shared.numel())
    found = [
        _contender(GLOO, operation, ordinary, gloo),
        _contender(SHM, operation, ordinary, shm),
        _contender(IN_PLACE, operation, shared, shm),
    ]
    if operation == "all_reduce" and shared.numel() * 4 >= BOUND_FROM_BYTES:
        found.append(Contender(BOUND, partial(shared.fill_, 1.0), _passes(shared, shm)))
    return found


def _contender(
    name: str, operation: str, whole: torch.Tensor, group: dist.ProcessGroup
) -> Contender:
    """One for whom ``whole`` is the larger of the tensors, where they differ in size."""
    parts = list(whole.chunk(group.size()))
    # A rank's own part of a gathered, or a scattered, tensor is a tensor by itself.
    part = torch.empty_like(parts[group.rank()])
    call: Callable[[], object] = {
        "all_reduce": partial(dist.all_reduce, whole, group=group),
        "broadcast": partial(dist.broadcast, whole, group_src=0, group=group),
        "all_gather": partial(dist.all_gather, parts, part, group=group),
        "reduce_scatter": partial(dist.reduce_scatter, part, parts, group=group),
    }[operation]
    written = part if operation == "all_gather" else whole
    return Contender(name, partial(written.fill_, 1.0), call)


def _passes(shared: torch.Tensor, shm: SharedMemoryGroup) -> Callable[[], None]:
    """The passes of an all-reduce in place, without a word to the other ranks.

    Each rank reads its share of the elements from every rank's buffer, and writes it to every
    rank's buffer: less is impossible for an all-reduce in which each element is summed once.
    """
    team = shm._transport
    place = team.find(shared)
    assert place is not None
    places = team.exchange(Signature("bound"), place, _TIMEOUT_SECONDS)
    with torch.inference_mode():
        buffers = [
            shared if rank == team.rank else team.at(rank, place, shared.dtype, shared.numel())
            for rank, place in enumerate(places)
        ]
        shares = [buffer.chunk(team.size)[team.rank] for buffer in buffers]
        blocks = list(zip(*(share.split(_BLOCK_NUMEL) for share in shares), strict=True))

    def run() -> None:
        with torch.inference_mode():
            for target, second, *others in blocks:
                torch.add(target, second, out=target)
                for other in others:
                    torch.add(target, other, out=target)
                for copy in (second, *others):
                    copy.copy_(target)

    return run
