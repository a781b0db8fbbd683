"""What ranks tell each other behind the last bucket: no step needs a collective for it."""

from __future__ import annotations

import torch

# On how many ranks the backward failed, and their numbers added up.
_NUM_FAILURE_FACTS = 2


def num_facts(num_parameters: int) -> int:
    """How many elements the facts take."""
    return num_parameters + _NUM_FAILURE_FACTS


def write_facts(tail: torch.Tensor, touched: bytearray, failed_rank: int | None) -> None:
    """Write this rank's facts; those of all ranks are added up, or averaged.

    Args:
        tail: Where to; of the dtype of the last bucket.
        touched: For each parameter, whether this rank has added to its gradient.
        failed_rank: The number of this rank, if its backward has failed: then it used nothing.
    """
    used, failures = tail[:-_NUM_FAILURE_FACTS], tail[-_NUM_FAILURE_FACTS:]
    failures.zero_()
    if failed_rank is not None:
        used.zero_()
        failures.copy_(torch.tensor([1, failed_rank]))
    elif all(touched):
        used.fill_(1)
    else:
        used.copy_(torch.tensor(list(touched), dtype=used.dtype))


def used_by_any(tail: torch.Tensor) -> list[float]:
    """For each parameter more than 0 if any rank used it. Reading it waits for a GPU."""
    used: list[float] = tail[:-_NUM_FAILURE_FACTS].tolist()
    return used


def failed_ranks(tail: torch.Tensor, factor: int) -> tuple[int, int]:
    """On how many ranks the backward failed, and their numbers added up; unknown on a GPU.

    To read it would wait for one. There, what a rank sends whose backward has failed is NaN or, to
    a communication hook, which may remember it, 0.

    Args:
        tail: The facts of all ranks.
        factor: By what they were divided.
    """
    if tail.device.type != "cpu":
        return 0, 0
    facts = tail[-_NUM_FAILURE_FACTS:]
    number, ranks = (facts.real if facts.is_complex() else facts).tolist()
    return round(number * factor), round(ranks * factor)
