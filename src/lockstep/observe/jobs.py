"""``lockstep run --trace`` and ``lockstep explain``: jobs whose ranks are watched.

Nothing here imports torch, but in a rank: it makes the context in which it runs the program.
"""

from __future__ import annotations

import itertools
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

from lockstep.errors import BadLaunch
from lockstep.launcher import Job


def _recording(
    folder: Path, steps: tuple[int, int] | None, rank: int
) -> AbstractContextManager[object]:
    from lockstep.observe.tracing import recording

    return recording(folder, rank, steps)


def _explaining(rank: int) -> AbstractContextManager[object]:
    from lockstep.observe.explanation import explaining

    return explaining(rank)


def traced(job: Job, folder: str, steps: str | None) -> Job:
    """Return ``job`` with all its ranks recorded in ``folder``.

    Raises:
        BadLaunch: If the folder can't be written to, or ``steps`` aren't like ``"10:20"``.
    """
    window = None
    if steps is not None:
        first, _, stop = steps.partition(":")
        if not (first.isdecimal() and stop.isdecimal() and int(first) < int(stop)):
            raise BadLaunch(f"--trace-steps is {steps!r}; two numbers are needed, as in 10:20.")
        window = int(first), int(stop)
    path = Path(folder).absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
        for old in itertools.chain(path.glob("rank-*.spans"), path.glob("rank-*.json")):
            old.unlink()
    except OSError as error:
        raise BadLaunch(f"--trace {folder} can't be written to: {error.strerror}.") from error
    return job._replace(around=partial(_recording, path, window))


def explained(job: Job) -> Job:
    """Return ``job`` with all its ranks ended after two steps, when rank 0 explains its models."""
    return job._replace(around=_explaining, labelled=False)
