"""Errors and log messages about gradients that can't be reduced, or need not be."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

import torch
import torch.distributed as dist

from lockstep.comm import explained, global_rank, is_from_group
from lockstep.errors import CollectiveFailed, LateGradient

_log = logging.getLogger(__name__)

# The number of backwards, from the first on, in which all ranks must have equal gradients before
# the warning: in one they may be equal by coincidence, as with a loss that ignores the input.
_NUM_SAME_BACKWARDS = 3
# About this number of elements of each bucket is compared.
_SAMPLE_NUMEL = 1024


@contextmanager
def naming(names: Sequence[str], group: dist.ProcessGroup) -> Iterator[None]:
    """Note in errors of ``group`` that they come from the reduction of the gradients ``names``."""
    try:
        yield
    except RuntimeError as error:
        raise_named(error, names, group)


def raise_named(error: RuntimeError, names: Sequence[str], group: dist.ProcessGroup) -> NoReturn:
    """Raise ``error`` of ``group``, with a note that it comes from the reduction of ``names``."""
    # Any other error is the communication hook's own.
    if not is_from_group(error) and not isinstance(error, CollectiveFailed):
        raise error
    failed = explained(group, "all_reduce", error)
    ends = [*dict.fromkeys([*names[:1], *names[-1:]])]
    described = " to ".join(map(repr, ends)) or "no parameter"
    failed.add_note(f"This was the all-reduce of the gradients of {described}.")
    if failed is error:
        raise failed
    raise failed from error


def late_gradient(name: str) -> LateGradient:
    """Return the error for a gradient that is computed after its bucket was launched."""
    return LateGradient(
        f"{name!r} got a gradient in a backward that had already sent the one before, so the mean "
        "over the ranks would be wrong. A backward inside of a backward does that, such as "
        "checkpoint(..., use_reentrant=True) on shared weights; use_reentrant=False does not. "
        "Repeat the step: from now on gradients are sent when a backward is over."
    )


def failed_elsewhere(num_failed: int, ranks: int, group: dist.ProcessGroup) -> CollectiveFailed:
    """Return the error for a rank whose backward succeeded, while it failed on others.

    ``ranks`` is the sum of the numbers of the failed ranks: with one, its number.
    """
    who = f"rank {global_rank(group, ranks)}" if num_failed == 1 else f"{num_failed} other ranks"
    here = global_rank(group, group.rank())
    return CollectiveFailed(
        f"A backward failed on {who}, so that the gradients of this step, on rank {here}, would "
        "lack a part, and are lost. Look at what that rank wrote. To go on without the step, catch "
        "the error on every rank."
    )


def failed_before(failed: tuple[int, int] | None, group: dist.ProcessGroup) -> CollectiveFailed:
    """Return the error for all ranks if they have heard of a failed backward on a GPU only now.

    Args:
        failed: On how many ranks, and the sum of their numbers; None if others have heard of it.
        group: The ranks.
    """
    num_failed, ranks = failed or (0, 0)
    who = f"rank {global_rank(group, ranks)}" if num_failed == 1 else "some rank"
    return CollectiveFailed(
        f"A backward failed on {who} some steps ago, and its error was caught there. On "
        "accelerators ranks learn of it only now, as none waits for another: the gradients of that "
        "step were no numbers, or lacked a part, and an optimizer that has stepped with them has "
        "changed parameters and state on some ranks, or on all. Go on from a checkpoint from "
        "before, and let the error end the rank."
    )


class GradientLog:
    """Logs, once each, that no rank uses some parameters, and that all ranks have equal gradients.

    Gradients are equal if the program forgot its distributed sampler. In the first few backwards
    rank 0 compares its gradients with the mean over all ranks, which needs no collective: if they
    are equal to the mean, so are the gradients of all other ranks. Only rank 0's log is on.
    """

    def __init__(self, *, is_on: bool) -> None:
        self.is_on = self.logs_unused = self.compares = is_on
        self._num_equal = 0
        self._samples: list[tuple[torch.Tensor, torch.Tensor]] = []

    def unused(self, names: list[str]) -> None:
        """Log that no rank has used the parameters of these names."""
        self.logs_unused = False
        _log.info(
            "No rank used these parameters in this backward, so their gradients stay as they are: "
            "%s. (This is said once.)",
            ", ".join(names),
        )

    def keep(self, gradients: torch.Tensor, factor: int) -> None:
        """Keep ``gradients`` before their reduction, which multiplies equal ones by ``factor``."""
        if gradients.numel():
            sample = _sample(gradients)
            self._samples.append((sample, sample * factor))

    def keep_of_ranks(self, gradients: Sequence[torch.Tensor]) -> None:
        """Keep deferred gradients, given by rank, to be compared with each other."""
        self._samples += [(_sample(other), _sample(gradients[0])) for other in gradients[1:]]

    def drop(self) -> None:
        """Drop the kept gradients: their backward has failed."""
        self._samples = []

    def compare(self) -> None:
        """Compare the kept gradients with the reduced ones."""
        samples = [(r, e) for r, e in self._samples if bool(e.any()) and bool(e.isfinite().all())]
        self._samples = []
        if not samples:
            return
        # Scaling by a third, and adding up, rounds.
        self.compares = all(
            torch.allclose(reduced, expected, rtol=4 * torch.finfo(reduced.dtype).eps, atol=0)
            for reduced, expected in samples
        )
        self._num_equal += self.compares
        if self.compares and self._num_equal == _NUM_SAME_BACKWARDS:
            self.compares = False
            _log.warning(
                "In each of the first %s backwards all ranks had the same gradients, so they seem "
                "to train on the same samples, each doing the work of all. Give each its part: "
                "lockstep.DataLoader(dataset, batch_size), or a DistributedSampler. (This is said "
                "once.)",
                _NUM_SAME_BACKWARDS,
            )


def _sample(gradients: torch.Tensor) -> torch.Tensor:
    # An odd step, as gradients begin at multiples of powers of two, and others would see padding.
    return gradients[:: gradients.numel() // _SAMPLE_NUMEL | 1]
