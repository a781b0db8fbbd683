"""Noticing that every rank computes with the same samples, as it does without a sampler."""

from __future__ import annotations

import logging

import torch

_log = logging.getLogger(__name__)

# In how many first backwards gradients have to be equal on all ranks. Once may be a coincidence,
# such as a loss that doesn't depend on the input.
_NUM_BACKWARDS = 3
# How many numbers of each bucket are compared, about.
_SAMPLE_NUMEL = 1024


class SameData:
    """Compares this rank's gradients with the mean over all ranks, in the first few backwards.

    If they are the same number for number, so are the gradients of all other ranks. That needs no
    collective.

    Attributes:
        is_looking: Whether it has yet to find out.
    """

    def __init__(self) -> None:
        self.is_looking = True
        self._num_equal = 0
        self._samples: list[tuple[torch.Tensor, torch.Tensor]] = []

    def keep(self, gradients: torch.Tensor, factor: int) -> None:
        """Remember some of ``gradients``, flat, which are about to be reduced in place.

        Args:
            gradients: Those of one bucket.
            factor: How many times these they are then, if they are the same on all ranks.
        """
        if gradients.numel():
            sample = gradients[:: max(1, gradients.numel() // _SAMPLE_NUMEL)]
            self._samples.append((sample, sample * factor))

    def drop(self) -> None:
        """Forget what was kept: the backward has failed."""
        self._samples = []

    def compare(self, *, is_rank_0: bool) -> None:
        """The gradients are reduced; rank 0 warns if all ranks have had the same ones."""
        samples, self._samples = self._samples, []
        samples = [(reduced, expected) for reduced, expected in samples if _tells(expected)]
        if not samples:
            return
        # Scaling by a third, and adding up, rounds.
        self.is_looking = all(
            torch.allclose(reduced, expected, rtol=4 * torch.finfo(reduced.dtype).eps, atol=0)
            for reduced, expected in samples
        )
        self._num_equal += self.is_looking
        if self.is_looking and self._num_equal == _NUM_BACKWARDS:
            self.is_looking = False
            if is_rank_0:
                _log.warning(
                    "In each of the first %s backwards all ranks had the same gradients, so they "
                    "seem to train on the same samples, each doing the work of all. Give each its "
                    "part: lockstep.partition(dataset)[rank], or torch's DistributedSampler. (This "
                    "is said once.)",
                    _NUM_BACKWARDS,
                )


def _tells(gradients: torch.Tensor) -> bool:
    """Whether it means something that these are the same on all ranks."""
    return bool(gradients.any()) and bool(gradients.isfinite().all())
