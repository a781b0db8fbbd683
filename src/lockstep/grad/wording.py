"""What to say of gradients that can't be reduced, or need not be."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist

from lockstep.comm import explained, global_rank, is_from_group
from lockstep.errors import CollectiveFailed, LateGradient

_log = logging.getLogger(__name__)


@contextmanager
def naming(names: str, group: dist.ProcessGroup) -> Iterator[None]:
    """Say in errors that the gradients of ``names`` were to be reduced."""
    try:
        yield
    except RuntimeError as error:
        # What else a communication hook raises is its own.
        if not is_from_group(error) and not isinstance(error, CollectiveFailed):
            raise
        failed = explained(group, "all_reduce", error)
        failed.add_note(f"This was the all-reduce of the gradients of {names}.")
        if failed is error:
            raise
        raise failed from error


def late(name: str) -> LateGradient:
    """The error of a gradient that has come too late."""
    return LateGradient(
        f"{name} got a gradient in a backward that had already sent the one before, so the mean "
        "over the ranks would be wrong. A backward inside of a backward does that, such as "
        "checkpoint(..., use_reentrant=True) on shared weights; use_reentrant=False does not. "
        "Repeat the step: from now on gradients are sent when a backward is over."
    )


def failed_elsewhere(num_failed: int, ranks: int, group: dist.ProcessGroup) -> CollectiveFailed:
    """The error of a rank whose backward went well, when others' didn't.

    Args:
        num_failed: On how many ranks it failed.
        ranks: The sum of their numbers in ``group``.
        group: The ranks.
    """
    who = f"rank {global_rank(group, ranks)}" if num_failed == 1 else f"{num_failed} other ranks"
    here = global_rank(group, group.rank())
    return CollectiveFailed(
        f"A backward failed on {who}, so that the gradients of this step, on rank {here}, would "
        "lack a part, and are lost. Look at what that rank wrote. To go on without the step, catch "
        "the error on every rank."
    )


def tell_of_unused(names: Sequence[str]) -> None:
    """Log that no rank has used these parameters."""
    _log.info(
        "No rank used these parameters in this backward, so their gradients stay as they are: %s. "
        "(This is said once.)",
        ", ".join(names),
    )
