"""What is said while many more ranks start than the host has cores: it may take minutes."""

from __future__ import annotations

import os
import select
from collections.abc import Callable

from lockstep.launcher.job import Job, num_cores
from lockstep.run_status import RunStatus, in_time
from lockstep.status import now

# A core starts so many ranks in a few seconds.
_FEW_FOR_A_CORE = 8
_INTERVAL_NS = 5_000_000_000
_MOST_IDLE = 3  # a program may never call init()


class StartOfMany:
    """Says at once what is started, and every five seconds how far that is.

    Attributes:
        is_over: Whether there is no more to say: the ranks have met in ``init()``, or seem not to
            call it. Always so if there are few.
    """

    def __init__(self, job: Job, status: RunStatus) -> None:
        self._status, self._num_ranks, self._num_cores = status, job.num_ranks, num_cores()
        # A caller's output is its own.
        is_many = job.num_ranks > _FEW_FOR_A_CORE * self._num_cores and job.caller is None
        self.is_over = not is_many
        self._began = now()
        self._due = self._began + _INTERVAL_NS
        self._num_idle = 0  # how often in a row all had begun, and none waited
        if is_many:
            cores = "1 core" if self._num_cores == 1 else f"{self._num_cores} cores"
            _write(
                f"starting {self._num_ranks:,} ranks on {cores}, each a process with memory of its "
                f"own, of which no more than {self._num_cores} compute at a time. With -n "
                f"{self._num_cores} there is one for each core. Ctrl-C ends this."
            )

    def note_process(self, number: int) -> None:
        """There are so many processes, which have yet to begin."""
        if self._is_due():
            _write(f"{number:,} of {self._num_ranks:,} processes are there after {self._time()}.")

    def tell(self, say: Callable[[str], None]) -> None:
        """Say how many ranks have begun, if it is time to."""
        if not self._is_due():
            return
        states = self._status.read()
        num_begun = sum(state.pid > 0 for state in states)
        waiting = [state for state in states if (state.state, state.detail) == ("wait", "init")]
        self._num_idle = 0 if num_begun < len(states) or waiting else self._num_idle + 1
        # Who has waited before has left init(), which nobody does before all have come.
        has_met = any(state.waited for state in states if state not in waiting)
        if has_met or self._num_idle == _MOST_IDLE:
            self.is_over = True
            return
        say(
            f"{num_begun:,} of {self._num_ranks:,} ranks have begun the program after "
            f"{self._time()}, and {len(waiting):,} wait in init() for the others."
        )

    def seconds_left(self) -> float | None:
        """Return the seconds until :meth:`tell` is to be called; None if it needn't be."""
        return None if self.is_over else max(0.0, (self._due - now()) / 1e9)

    def _is_due(self) -> bool:
        time_now = now()
        if self.is_over or time_now < self._due:
            return False
        self._due = time_now + _INTERVAL_NS
        return True

    def _time(self) -> str:
        return in_time((now() - self._began) / 1e9)


def _write(words: str) -> None:
    """Write a line before there is a console, if a reader is there: no signal is heard yet."""
    if select.select([], [2], [], 0)[1]:
        os.write(2, f"lockstep: {words}\n".encode())
