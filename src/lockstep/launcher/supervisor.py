"""The process that starts the ranks of one host, watches them, and leaves none behind.

It imports torch once and forks the ranks: an import takes about a second, a fork a twentieth
of one. A fork copies only the thread that forks, so nothing here may start a thread before the
ranks are forked; the store, which has threads, is opened afterwards.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import signal
import sys
import time
from typing import NoReturn

from lockstep.errors import LaunchError
from lockstep.launcher.console import Console, open_log_files
from lockstep.launcher.forking import fork_ranks
from lockstep.launcher.handover import Descriptors, Outcome, read_command, read_job
from lockstep.launcher.host import alone, among
from lockstep.launcher.job import Job
from lockstep.launcher.meeting import open_store
from lockstep.launcher.peers import Peers
from lockstep.launcher.processes import MARK, adopt_orphans, children, end_with_parent
from lockstep.launcher.rank import RankStart, run_rank
from lockstep.launcher.signals import ENDING, SignalPipe, handle_ending_signals
from lockstep.launcher.verdict import describe, ended_by, exit_status, first_failure
from lockstep.launcher.watch import Watch


def main() -> int:
    """Run the job that the command line tells of.

    Returns:
        In a rank, and only there: its exit code. The caller exits with it, so that a rank ends
        as any Python program does. The supervisor has nothing to wait for, and just ends.
    """
    # Until there are ranks there is nothing to do but go, and no traceback to show.
    handle_ending_signals(lambda number, frame: os._exit(128 + number))
    caller, descriptors = read_command(sys.argv)
    del sys.argv[1:]
    if descriptors.lifeline is not None:
        end_with_parent(caller, signal.SIGTERM)
    job = read_job(descriptors.job)
    _import_torch()
    try:
        return _start(job, descriptors)
    except LaunchError as error:
        _conclude(Outcome(2, message=str(error)), descriptors)


def _import_torch() -> None:
    # The collector finds nothing to free in an import, but looks for it a hundred times.
    gc.disable()
    import torch
    import torch.distributed  # noqa: F401  (here, so that no rank has to)

    # What is frozen isn't visited by the ranks' collectors, so its memory stays shared.
    gc.freeze()
    gc.enable()


def _start(job: Job, descriptors: Descriptors) -> int:
    """Fork the ranks, and either be one, or watch them and end."""
    mark, supervisor, spare = os.environ[MARK], os.getpid(), children()
    adopt_orphans()
    peers, listener = None, None
    if job.meeting is None:
        host, listener = alone(job)
    else:
        peers = Peers(job.meeting, job.num_ranks)
        host = among(peers, job, job.meeting)
        spare += peers.helpers()
    log_files = open_log_files(job.log_dir, host.ranks)
    # A rank that is being born must not run the handlers below: they are the supervisor's.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {*ENDING, signal.SIGCHLD})
    signals = SignalPipe()
    ours = [*signals.descriptors, *descriptors.after_job(), *log_files.values()]
    ours += [listener] if listener is not None else []
    ours += peers.descriptors() if peers is not None else []
    forked = fork_ranks(
        host.ranks,
        host.environments,
        num_threads=job.num_threads,
        labelled=job.labelled,
        stdin_rank=job.stdin_rank,
        not_the_ranks=ours,
        signal_mask=mask,
    )
    if isinstance(forked, RankStart):
        return run_rank(forked, job.program, supervisor)
    # From here on this is the supervisor, whatever happens.
    console = Console(log_files, signals)
    watch = Watch(job, forked, mark, spare, console, signals=signals)
    watch.listen_to_caller(descriptors.lifeline)
    with watch:
        watch.guard()
        # Its threads are started while signals are blocked, so that none is sent to them.
        store = open_store(listener) if listener is not None else None
        if peers is not None:
            watch.listen_to(peers)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        watch.until_all_ended()
    del store
    outcome = _outcome(watch, host.world_size, job.full_traceback)
    if peers is not None:
        outcome = peers.settle(outcome, signals.is_pending)
    return _conclude(outcome, descriptors)


def _outcome(watch: Watch, world_size: int, full_traceback: bool) -> Outcome:
    endings = watch.endings()
    culprit = first_failure(endings)
    if culprit is not None:
        return Outcome(
            exit_status(culprit),
            message=describe(culprit, endings, world_size, full_traceback=full_traceback),
            rank=culprit.rank,
            exit_code=None if culprit.killed_by else exit_status(culprit),
            signal=culprit.killed_by,
            traceback=culprit.traceback,
            at_seconds=culprit.failed_at_seconds + time.time() - time.monotonic(),
            lost_a_peer=culprit.lost_a_peer,
        )
    if watch.peer_failed:
        return Outcome(0)  # which of them, and how, is for them to tell
    number = watch.interrupted_by
    if number is None:
        return Outcome(0, watch.results())
    if number == signal.SIGPIPE:  # as every program in a pipe that nobody reads from
        return Outcome(128 + number)
    return Outcome(128 + number, message=ended_by(number))


def _conclude(outcome: Outcome, descriptors: Descriptors) -> NoReturn:
    """Send ``outcome`` to the caller or, on a command line, print what it has to say."""
    if descriptors.outcome is not None:
        with contextlib.suppress(OSError), open(descriptors.outcome, "wb") as pipe:
            pickle.dump(outcome, pipe)
    elif outcome.message is not None:
        with contextlib.suppress(OSError):  # the terminal may be what is gone
            # Escaped as in Python's own tracebacks is what has no encoding: a lone surrogate.
            os.write(2, f"lockstep: {outcome.message}\n".encode(errors="backslashreplace"))
    os._exit(outcome.exit_status)
