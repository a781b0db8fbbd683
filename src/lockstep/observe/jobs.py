"""``lockstep run --trace`` and ``lockstep explain``: jobs whose ranks are watched.

Nothing here imports torch.
"""

from __future__ import annotations

import itertools
from contextlib import AbstractContextManager
from pathlib import Path

from lockstep.errors import BadLaunch
from lockstep.launcher import Job


class _Traced:
    """Makes the context in which a rank runs the program, there."""

    def __init__(self, folder: Path, steps: tuple[int, int] | None) -> None:
        self._folder, self._steps = folder, steps

    def __call__(self, rank: int) -> AbstractContextManager[object]:
        from lockstep.observe.trace import recording

        return recording(self._folder, rank, self._steps)


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
    return job._replace(around=_Traced(path, window))


class _Explained:
    """The same, for a rank that tells about its models and ends."""

    def __call__(self, rank: int) -> AbstractContextManager[object]:
        from lockstep.observe.explain_run import explaining

        return explaining(rank)


def explained(job: Job) -> Job:
    """Return ``job`` with all its ranks ended after two steps, when rank 0 explains its models."""
    return job._replace(around=_Explained(), labelled=False)
