"""The torch future of something that is to come, or to fail."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import torch

from lockstep.comm.uncompiled import uncompiled


class Outcome:
    """What is to come, and a future that tells it to Python and to torch's C++ alike.

    Attributes:
        future: Has the result, or raises a RuntimeError with the error's name and text. torch's
            reducer reads it in C++, where ``set_exception`` would look like a result: that is
            known to Python alone. An error in ``then`` is known to both. Shown by
            test_torchs_ddp_is_told_of_a_lost_rank.
        is_told: Whether it has been told.
    """

    def __init__(self) -> None:
        self.is_told = False
        self._lock = threading.Lock()
        self._outcome: list[Any] = []
        self._told: torch.futures.Future[None] = torch.futures.Future()
        self.future: torch.futures.Future[Any] = self._told.then(partial(_take, self._outcome))

    def tell(self, result: Any, error: Exception | None) -> None:
        """Have ``result``, or fail with ``error``; only the first time counts."""
        if error is not None:
            result = RuntimeError(f"{type(error).__name__}: {error}")
        with self._lock:
            if self.is_told:
                return
            self.is_told = True
        self._outcome.append(result)
        self._told.set_result(None)


@uncompiled
def _take(outcome: list[Any], _: object) -> Any:
    if isinstance(outcome[0], Exception):
        raise outcome.pop()
    return outcome.pop()
