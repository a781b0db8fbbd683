"""The process that forks the ranks of one host, watches them, and leaves none behind.

It imports torch once: an import takes about a second, a fork a twentieth of one. A fork copies only
the thread that forks, so the ranks are forked first, and wait for their environments until the
store, which has threads, is open and all hosts have met there.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import signal
import sys
from collections.abc import Collection
from types import FrameType
from typing import NoReturn

from lockstep.errors import LaunchError
from lockstep.launcher import processes
from lockstep.launcher.failures import Ended, JobOutcome
from lockstep.launcher.job import Job, name_of_program
from lockstep.launcher.live import Live, terminal
from lockstep.launcher.output import Console
from lockstep.launcher.rank_process import fork_ranks, kill_ranks, none_ended
from lockstep.launcher.snapshot_memory import SnapshotMemory
from lockstep.launcher.starting import StartOfMany
from lockstep.launcher.watch import Watch
from lockstep.printable import printable_lines, signal_name
from lockstep.run_status import RunStatus


def main() -> int:
    """Run the job that the command line tells of; in a rank, and only there, return its exit code.

    The caller exits with it, so that a rank ends as any Python program does.
    """
    # Until there are ranks there is nothing to do but end, and no traceback to show.
    processes.handle(processes.ENDING_SIGNALS, lambda number, frame: os._exit(128 + number))
    processes.handle(processes.PASSED_SIGNALS, _tell_unheard)
    descriptor = int(sys.argv[1])
    with open(descriptor, "rb", closefd=False) as file:
        job: Job = pickle.load(file)
    if job.meeting is None:  # else it shows other launchers on this host that this one is there
        os.close(descriptor)
    else:
        os.set_inheritable(descriptor, False)
    del sys.argv[1:]
    processes.handle(job.stop_signals, lambda number, frame: os._exit(128 + number))
    if job.caller is not None:
        processes.end_with_parent(os.getppid(), signal.SIGTERM)
    try:
        return _start(job)
    except Ended as error:
        _conclude(job, error.outcome)
    except LaunchError as error:
        _conclude(job, JobOutcome(2, message=str(error)))


def _tell_unheard(number: int, _: FrameType | None) -> None:
    words = f"lockstep: {signal_name(number)} came before there were ranks: nothing is done.\n"
    os.write(2, words.encode())


def _start(job: Job) -> int:
    """Fork the ranks, and either be one, or watch them and end."""
    # The collector finds nothing to free in an import, but looks for it a hundred times.
    gc.disable()
    from lockstep.launcher.hosts import Host  # imports torch, so that no rank has to

    if job.restarts:
        from lockstep.launcher.zygote import import_what_ranks_need

        import_what_ranks_need()
    # Frozen objects aren't visited by the ranks' collectors, so their memory stays shared.
    gc.freeze()
    gc.enable()
    spare = processes.children()
    processes.adopt_orphans()
    # Blocked, so that no rank runs the supervisor's handlers.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, processes.SIGNALS)
    try:
        status = RunStatus.create(name_of_program(job.program), job.num_ranks)
    except OSError as error:
        raise LaunchError(
            f"There is no memory in which the ranks tell what they do: {error.strerror}. To the "
            "kernel it is a file: is there a limit on the size of files (ulimit -f)? It is to be "
            f"{RunStatus.num_bytes(job.num_ranks) >> 10} KiB or more. Nothing was begun."
        ) from error
    is_live = job.live and job.labelled and terminal() is not None
    for of_rank in status.ranks:
        of_rank.is_shown = is_live
    if job.restarts:
        return _start_attempts(job, mask, status, spare, is_live=is_live)
    start = StartOfMany(job, status)
    ranks = fork_ranks(job, mask, status, start, os.getpid())
    if not isinstance(ranks, list):
        return ranks()
    # From here on this is the supervisor.
    guardian = processes.Guardian.start([rank.pid for rank in ranks], os.getpid())
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    try:
        host = Host(job, none_ended(ranks))
        live = Live(status, host.world_size) if is_live else None
        signals = processes.SignalPipe(job.stop_signals)
        console = Console(signals, live)
        console.keep_logs(job.log_dir, host.ranks)
        watch = Watch(job, host, ranks, console, signals, status)
    except (LaunchError, Ended):
        kill_ranks(ranks)
        raise
    else:
        watch.run(start, {*spare, guardian.pid})
    finally:
        guardian.dismiss()
    return _conclude(job, host.settle(watch.outcome(), signals.take_ending), console)


def _start_attempts(
    job: Job,
    signal_mask: Collection[int],
    status: RunStatus,
    spare: Collection[int],
    *,
    is_live: bool,
) -> int:
    """The same, for a run whose ranks may be started again."""
    from lockstep.launcher.attempts import Attempts
    from lockstep.launcher.zygote import Forking, Zygote, fork_zygote

    try:
        snapshots = tuple(
            (
                *SnapshotMemory.create(rank),
                *(() if job.meeting is None else SnapshotMemory.create(rank, of_copies=True)),
            )
            for rank in range(job.num_ranks)
        )
    except OSError as error:
        raise LaunchError(
            f"There are no files for snapshots of the ranks: {error.strerror}. Nothing was begun. "
            "Ask for fewer ranks, raise the limit on open files (ulimit -n), or leave --restarts "
            "out."
        ) from error
    forking = Forking(job, tuple(signal_mask), snapshots, os.getpid())
    zygote = fork_zygote(forking, status)
    if not isinstance(zygote, Zygote):
        return zygote()
    signal.pthread_sigmask(signal.SIG_SETMASK, signal_mask)
    zygote.spare.update(spare)
    attempts = Attempts(job, zygote, status, snapshots, is_live=is_live)
    try:
        outcome = attempts.run()
    finally:
        zygote.end()
    return _conclude(job, outcome, attempts.console)


def _conclude(job: Job, outcome: JobOutcome, console: Console | None = None) -> NoReturn:
    """Send ``outcome`` to the caller or, on a command line, print its message; then end."""
    words = None
    if job.caller is None and outcome.message is not None:
        words = printable_lines(outcome.message)
    with contextlib.suppress(OSError):  # the caller, or the terminal, may be gone
        if console is not None:
            console.finish(words)
        elif words is not None:
            os.write(2, f"lockstep: {words}\n".encode())
        if job.caller is not None:
            with open(job.caller, "wb") as connection:
                pickle.dump(outcome, connection)
    os._exit(outcome.exit_status if outcome.run_status is None else outcome.run_status)
