"""Waiting for what other threads and processes do."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

from lockstep.deadline import Deadline


def until(condition: Callable[[], object], seconds: float = 60.0) -> bool:
    """Whether ``condition`` became true within ``seconds``: many, as machines may stand still."""
    return Deadline(seconds).until(condition, 0.02)


def until_line(word: str, run: subprocess.Popen[str]) -> None:
    """Read the output of ``run`` up to a line with ``word``."""
    assert run.stdout is not None
    while word not in (line := run.stdout.readline()):
        assert line, run.communicate()
