"""The last snapshot of ranks that didn't come to the end of a step, or aren't started again.

A process of its own writes it out as a checkpoint: see lockstep.resume.last_snapshot.
"""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

from lockstep.deadline import Deadline
from lockstep.launcher.failures import JobOutcome
from lockstep.launcher.interpreter import command_of
from lockstep.launcher.restarts import START_AGAIN

_POLL_SECONDS = 0.05
_KILL_SECONDS = 5.0  # until a process is left that SIGKILL doesn't end, as on a disk that hangs
_WRITER = "lockstep.resume.last_snapshot"


class WrittenOut(NamedTuple):
    """What came of it."""

    step: int | None = None  # how many steps the snapshot has; None if there is none
    path: str = ""  # the folder of checkpoints; "" if the program has none
    error: str = ""  # why it isn't there
    is_new: bool = False  # whether it was written, and no checkpoint was as new before


def write_out(
    descriptors: Sequence[Sequence[int]],
    take_signals: Callable[[], Collection[int]],
    most_seconds: float,
) -> WrittenOut:
    """Have the newest snapshot that all ranks have written as a checkpoint; Ctrl-C ends that.

    Args:
        descriptors: Those of the memories for snapshots, in the order of ranks.
        take_signals: Returns the ending signals that have come since it was called last.
        most_seconds: How long that may take.
    """
    writer = _start(descriptors)
    limit, told, errors, ended = Deadline(most_seconds), b"", b"", ""
    while True:
        try:
            told, errors = writer.communicate(timeout=_POLL_SECONDS)
            break
        except subprocess.TimeoutExpired:
            is_over = not limit.left()
        if ended and is_over:
            break
        if not ended and (is_over or signal.SIGINT in take_signals()):
            ended = "Ctrl-C came"
            if is_over:
                ended = f"that took longer than {most_seconds:g} s; a longer --grace allows more"
            writer.kill()
            limit = Deadline(_KILL_SECONDS)
    writer.poll()
    for pipe in (writer.stdout, writer.stderr):
        assert pipe is not None
        pipe.close()
    try:
        return WrittenOut(**json.loads(told))
    except (ValueError, TypeError):
        lines = errors.decode(errors="replace").strip().splitlines()
        how = lines[-1] if lines else f"the process that writes it ended with {writer.returncode}"
        return WrittenOut(error=ended or how)


def _start(descriptors: Sequence[Sequence[int]]) -> subprocess.Popen[bytes]:
    # Schedulers send their signals to every process of a job, and this one is to come to its end.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGHUP})
    try:
        return subprocess.Popen(
            command_of(_WRITER, json.dumps(descriptors)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=[each for pair in descriptors for each in pair],
            start_new_session=True,  # Ctrl-C comes to this process alone
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def with_last_snapshot(
    outcome: JobOutcome, written: WrittenOut, *, is_given_up: bool = False
) -> JobOutcome:
    """The outcome of a run, with what came of its last snapshot.

    The same command is to be given again, unless the run ``is_given_up``: it would fail again.
    """
    if written.error:
        told = f"the last snapshot wasn't written as a checkpoint: {written.error}"
    elif written.step is None:
        return outcome
    elif not written.path:
        told = f"the state after {written.step} steps is lost, as steps() has no path."
    else:
        how = "was written" if written.is_new else "is a checkpoint"
        told = f"The state after {written.step} steps {how} in {written.path}. "
        if is_given_up:
            told += "Mend the cause, and give the same command again to go on from there."
        else:
            told += "Give the same command again to go on from there."
            outcome = replace(outcome, run_status=START_AGAIN)
            if outcome.lost_host is None:
                told = f"the ranks hadn't come to a step's end. {told}"
    return replace(outcome, message=f"{outcome.message or ''}\n{told}".strip())
