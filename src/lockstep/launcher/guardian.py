"""The process that ends the ranks if their supervisor is killed.

``kill -9`` gives the supervisor no say. The kernel then ends the ranks, which asked for it
(see :func:`~lockstep.launcher.processes.end_with_parent`), but not what they started: their
data loader workers, a ``sleep``. The guardian does. If both are killed the kernel still ends
the ranks themselves.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Collection

from lockstep.launcher.processes import fork_helper, leftovers, reap, signal_group

_GOODBYE = b"."


class Guardian:
    """The supervisor's end of the guardian."""

    def __init__(self, pid: int, lifeline: int) -> None:
        self.pid = pid
        self._lifeline = lifeline

    def dismiss(self) -> None:
        """Tell the guardian that nobody is left to be ended, and wait for it to go."""
        try:
            os.write(self._lifeline, _GOODBYE)
        except BrokenPipeError:
            pass  # it was killed
        finally:
            os.close(self._lifeline)
        reap(self.pid)


def start_guardian(groups: Collection[int], mark: str) -> Guardian:
    """Fork the guardian of the process groups ``groups``.

    Call it after the ranks are forked, so that none of them holds the lifeline open.
    """
    listening, lifeline = os.pipe()
    pid = fork_helper(lambda: _guard(groups, mark), listening)
    os.close(listening)
    return Guardian(pid, lifeline)


def _guard(groups: Collection[int], mark: str) -> None:
    if os.read(0, 1) == _GOODBYE:
        return
    for group in groups:
        signal_group(group, signal.SIGKILL)
    for _ in range(2):  # twice: one might have been starting another
        for pid in leftovers(groups, mark):
            os.kill(pid, signal.SIGKILL)
