"""What a rank does and when, for whoever records it; next to nothing is done if nobody does.

While :func:`lockstep.trace` records, it is the ``recorder``. In a rank of ``lockstep run`` the
``status`` tells the launcher. While torch.profiler runs, spans are ranges of it, too, under the
same names.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from torch.autograd import profiler
from torch.optim import Optimizer

from lockstep.status import RankStatus

NAMES = {
    "data": "the loader makes this rank's part of a global batch",
    "forward": "from the batch, or the backward or step before, to the backward: the program's own "
    "code, whichever method it calls",
    "backward": "autograd, and what lockstep does in it",
    "average": "lockstep.average_gradients()",
    "rows": "the ranks exchange the rows of sparse gradients",
    "launch": "a collective is started, or a communication hook called",
    "wait": "for other ranks, in a collective of lockstep's, and its sum in shared memory",
    "optimizer": "a step of an optimizer",
    "save": "lockstep.save(), or its part before training goes on",
    "evaluation": "batches from which no gradients are computed, and what is done with them",
    "bucket": "from its last gradient until its sums are there",
    "all-reduce": "from the launch of a bucket until its sums are there",
}


class Recorder(Protocol):
    """Takes spans of all ranks in this process."""

    def begin(self, name: str) -> bool:
        """A span of this thread begins; False if it is inside of one of the same name."""

    def end(self, name: str, start: int, detail: str, num_bytes: int) -> None:
        """The span that began last ends; ``start`` is by :func:`now`."""

    def bucket(self, bucket: Any, index: int, times: tuple[int, int, int]) -> None:
        """A bucket of gradients was full, launched and summed at these times."""

    def batch(self, loader: object, num_samples: int) -> None:
        """A loader has given the program a batch, of so many samples on this rank; 0: unknown."""

    def end_of_epoch(self, loader: object) -> None:
        """A loader has no batch left."""

    def log(self, values: Mapping[str, float]) -> None:
        """The program logs values."""


class StepCounter:
    """Tells which steps of optimizers are steps of the program: those of its first optimizer.

    It is another one as soon as that has stepped three times without the first: a program may train
    in stages, each with an optimizer of its own.
    """

    _MOST_STEPS_OF_ANOTHER = 3

    def __init__(self) -> None:
        self._first: weakref.ref[Optimizer] | None = None
        self._others: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()

    def counts(self, optimizer: Optimizer) -> bool:
        """Whether a step of ``optimizer``, which it has just taken, ends one of the program."""
        first = None if self._first is None else self._first()
        if first is not None and first is not optimizer:
            self._others[optimizer] = self._others.get(optimizer, 0) + 1
            if self._others[optimizer] < self._MOST_STEPS_OF_ANOTHER:
                return False
        if first is not optimizer:
            self._first = weakref.ref(optimizer)
        self._others.clear()
        return True


recorder: Recorder | None = None
status: RankStatus | None = None
now = time.perf_counter_ns
_NOTHING = nullcontext()


def span(name: str, detail: str = "", num_bytes: int = 0) -> AbstractContextManager[object]:
    """Return the context of something with a name out of ``NAMES``.

    ``detail`` is one word more, and ``num_bytes`` what this rank gives to a collective in it.
    """
    if recorder is None and status is None and not profiler._is_profiler_enabled:
        return _NOTHING
    return _Span(name, detail, num_bytes)


class _Span:
    def __init__(self, name: str, detail: str, num_bytes: int) -> None:
        self._name, self._detail, self._num_bytes = name, detail, num_bytes
        self._recorder, self._status = recorder, status
        self._former_state = 0
        self._range: Any = None

    def __enter__(self) -> None:
        if profiler._is_profiler_enabled:
            self._range = profiler.record_function(f"lockstep: {self._name}")
            self._range.__enter__()
        if self._recorder is not None and not self._recorder.begin(self._name):
            self._recorder = None
        if self._status is not None:
            self._former_state = self._status.enter(self._name, self._detail)
        self._start = now()

    def __exit__(self, *error: object) -> None:
        if self._status is not None:
            self._status.leave(self._former_state)
        if self._recorder is not None:
            self._recorder.end(self._name, self._start, self._detail, self._num_bytes)
        if self._range is not None:
            self._range.__exit__(*error)
