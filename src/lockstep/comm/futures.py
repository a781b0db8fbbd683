"""Futures of torch that fail."""

from __future__ import annotations

import copy
from typing import Any

import torch


def fail(future: torch.futures.Future[Any], error: Exception) -> None:
    """Make ``future`` raise ``error``, each time as a new exception.

    Not by ``set_exception``: the exception would have a traceback, whose frames hold the future,
    which holds it, in C++, where the collector doesn't find it. A group and its memory would be
    left for each failure. Shown by test_a_work_tells_what_went_wrong, with its look at leaks.
    """
    kept = copy.copy(error)  # without the traceback

    def raise_it(_: object) -> None:
        raise copy.copy(kept)

    future._set_unwrap_func(raise_it)
    future.set_result(None)
