"""``World.main_first()``: some ranks go through a context before the others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
import torch.distributed as dist

from lockstep.comm import all_gather_bytes, device_of_facts, global_rank, join_state_of, sum_at
from lockstep.errors import CollectiveFailed, LockstepError

_CALL = "main_first"


@contextmanager
def first_alone(group: dist.ProcessGroup | None, is_first: bool) -> Iterator[None]:
    """Let ranks that are first go through the context before the others begin with it."""
    if group is None or group.size() == 1:
        yield
        return
    if join_state_of(group) is not None:
        raise CollectiveFailed(
            "main_first() was called inside of join(), where ranks without data don't call it, and "
            "the others would wait for them. Call it before the loop."
        )
    if not is_first:
        _meet(group)
        yield
        return
    try:
        yield
    except Exception as error:
        # The others come here in any case. The program's own error is the one to raise.
        with suppress(LockstepError):
            _meet(group, f"{type(error).__name__}: {error}")
        raise
    _meet(group)


def _meet(group: dist.ProcessGroup, trouble: str = "") -> None:
    """Wait for all ranks, and raise what a first one tells; every rank calls it once."""
    device = device_of_facts(group)
    num_troubles = torch.tensor([bool(trouble)], dtype=torch.int32, device=device)
    sum_at(group, _CALL, num_troubles)
    if not num_troubles.item():
        return
    for rank, told in enumerate(all_gather_bytes(group, trouble.encode(), device)):
        if told:
            first = global_rank(group, rank)
            raise CollectiveFailed(
                f"Rank {first} failed inside of main_first(), for which the others waited: "
                f"{told.decode(errors='replace')}",
                [first],
                _CALL,
            )
