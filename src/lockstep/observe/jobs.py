"""``lockstep run --trace`` and ``lockstep explain``: jobs whose ranks are watched.

Nothing here imports torch, but in a rank: it makes the context in which it runs the program.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path

from lockstep.errors import BadLaunch
from lockstep.folders import FULL_DISK
from lockstep.launcher import Job, absolute_path, supervise
from lockstep.printable import shown

_BASELINE_STEPS = 30


@contextmanager
def _recording(
    folder: Path, steps: tuple[int, int] | None, operators: bool, rank: int
) -> Iterator[object]:
    from lockstep.observe.tracing import recording

    with recording(folder, rank, steps) as rank_trace:
        if not operators:
            yield rank_trace
            return
        from lockstep.observe.operators import recording_operators

        first = 0 if steps is None else steps[0]
        with recording_operators(first, lambda: rank_trace.step, rank_trace.put):
            yield rank_trace


@contextmanager
def _recording_some(folder: Path, rank: int) -> Iterator[None]:
    """Record a rank, and end the program after some steps, without a checkpoint to go on from."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from lockstep import checkpoint
    from lockstep.observe.tracing import recording

    with recording(folder, rank) as rank_trace:

        def after_step(*_: object) -> None:
            if rank_trace.step >= _BASELINE_STEPS:
                sys.exit(0)

        handle, save = register_optimizer_step_post_hook(after_step), checkpoint.save
        vars(checkpoint)["save"] = lambda path, **_: Path(path).absolute() / "000000"
        try:
            yield
        finally:
            handle.remove()
            vars(checkpoint)["save"] = save


def _explaining(rank: int) -> AbstractContextManager[object]:
    from lockstep.observe.explanation import explaining

    return explaining(rank)


def traced(
    job: Job,
    folder: str | None,
    steps: str | None,
    baseline: bool = False,
    operators: bool = False,
) -> Job:
    """Return ``job`` with all its ranks recorded in ``folder``.

    Args:
        job: What is run.
        folder: Where the trace goes.
        steps: The steps to record, as in ``"10:20"``; by default all.
        baseline: Whether to run some steps on one rank before, into ``folder/baseline``.
        operators: Whether to record the operators of some steps.

    Raises:
        BadLaunch: If the folder can't be written to, ``steps`` aren't such numbers, or the run on
            one rank makes no sense or fails.
    """
    if folder is None:
        option = "--baseline" if baseline else "--trace-operators"
        option = option if steps is None else "--trace-steps"
        raise BadLaunch(f"{option} is for --trace DIR. Leave it out.")
    window = None
    if steps is not None:
        first, _, stop = steps.partition(":")
        if not (first.isdecimal() and stop.isdecimal() and int(first) < int(stop)):
            raise BadLaunch(f"--trace-steps is {steps!r}; two numbers are needed, as in 10:20.")
        window = int(first), int(stop)
    path = absolute_path("--trace", folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
        for old in itertools.chain(path.glob("rank-*.spans"), path.glob("rank-*.json")):
            old.unlink()
    except OSError as error:
        if error.errno not in FULL_DISK:  # of which each rank tells, and trains on
            raise BadLaunch(
                f"--trace {shown(folder)} can't be written to: {error.strerror}."
            ) from error
    if baseline:
        _take_steps_alone(job, path / "baseline")
    return job._replace(around=partial(_recording, path, window, operators))


def _take_steps_alone(job: Job, folder: Path) -> None:
    """Record some steps on one rank, that computes with as many threads as each of the job's."""
    if job.num_ranks < 2 or job.meeting is not None:
        raise BadLaunch(
            "--baseline compares several ranks of one host with one. Give -n 2 or more, and no "
            "--nnodes."
        )
    print(f"lockstep: {_BASELINE_STEPS} steps on one rank, for the report", flush=True)
    around = partial(_recording_some, folder)
    outcome = supervise(job._replace(num_ranks=1, restarts=0, around=around))
    if outcome.exit_status:
        raise BadLaunch(f"--baseline: the run on one rank failed. {outcome.message or ''}".strip())


def explained(job: Job) -> Job:
    """Return ``job`` with all its ranks ended after two steps, when rank 0 explains its models."""
    return job._replace(around=_explaining, labelled=False)
