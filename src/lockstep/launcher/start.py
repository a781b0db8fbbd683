"""How a job gets to its supervisor: ``lockstep run`` becomes it, ``launch()`` has it as a child.

The supervisor is a fresh interpreter, which imports nothing but torch and this package: a program
finds none of the command line's libraries imported, and no thread or lock of a caller's notebook.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import pickle
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Literal, NoReturn, TextIO, TypeVar

from lockstep.errors import BadLaunch, LaunchError
from lockstep.launcher.failures import JobOutcome
from lockstep.launcher.interpreter import command_of
from lockstep.launcher.job import (
    GRACE_SECONDS,
    Job,
    absolute_path,
    check_grace,
    check_num_ranks,
    check_num_threads,
    check_restarts,
    name_of,
)
from lockstep.launcher.processes import MARK, fill_standard_descriptors, flush_standard_streams
from lockstep.memory_files import memory_file
from lockstep.printable import printable_lines
from lockstep.world import allocator_environment, quiet_environment

Result = TypeVar("Result")

_READ_BYTES = 1 << 16
_TO_KILL_SECONDS = 10.0  # longer than the supervisor takes to kill ranks, after their grace


def run_job(job: Job) -> NoReturn:
    """Replace this process by the supervisor of ``job``; it keeps the process id.

    Raises:
        LaunchError: If the interpreter can't be started.
    """
    fill_standard_descriptors()
    descriptor, command, environment = _prepare(job)
    os.set_inheritable(descriptor, True)
    try:
        os.execve(sys.executable, command, environment)
    except OSError as error:
        raise LaunchError(f"{sys.executable} can't be started: {error.strerror}.") from error


def run_threads_job(job: Job) -> NoReturn:
    """Run ``job`` in this process, on ranks that are threads, and end it.

    Raises:
        RankFailed: If a rank didn't end well.
        BadLaunch: If the program can't be run so.
    """
    from lockstep.launcher.threads import run_program_in_threads  # imports torch

    outcome = run_program_in_threads(job)
    if outcome.exit_status and outcome.message:
        flush_standard_streams()
        print(f"lockstep: {printable_lines(outcome.message)}", file=sys.stderr, flush=True)
    sys.exit(outcome.exit_status)


def _prepare(job: Job) -> tuple[int, list[str], dict[str, str]]:
    """A nameless file that holds ``job``, and the command and environment of its supervisor."""
    flush_standard_streams()
    # A file rather than a pipe: it takes any size before a reader exists.
    meeting = job.meeting
    name = "lockstep-job" if meeting is None else f"{meeting.mark}{os.getpid()}"
    try:
        descriptor = memory_file(name)
        with open(descriptor, "wb", closefd=False) as file:
            pickle.dump(job, file)
            file.seek(0)
    except OSError as error:
        raise LaunchError(f"There is no file for what ranks are told: {error.strerror}.") from error
    command = command_of("lockstep.launcher.supervisor", str(descriptor))
    quiet = {} if meeting is None else quiet_environment()
    # The number of threads has to be there before torch is imported: OpenMP reads it once.
    variables = {"OMP_NUM_THREADS": str(job.num_threads), MARK: os.urandom(16).hex()}
    return descriptor, command, {**allocator_environment(), **quiet, **os.environ, **variables}


def launch(
    fn: Callable[..., Result],
    nprocs: int = 2,
    args: Sequence[object] = (),
    *,
    ranks: Literal["processes", "threads"] = "processes",
    num_threads: int | None = None,
    output: Literal["labelled", "plain"] = "labelled",
    log_dir: str | os.PathLike[str] | None = None,
    grace: float | None = None,
    restarts: int = 0,
) -> list[Result]:
    """Call ``fn(world, *args)`` on ``nprocs`` new processes and wait for all of them. ::

        def train(world, epochs):
            model = lockstep.parallelize(Net())
            ...  # the program, as for one process
            return accuracy(model)

        accuracies = lockstep.launch(train, nprocs=2, args=(10,))

    Each process is a rank, and ``world`` its World, as from :func:`lockstep.init`. The processes
    are fresh ones, not forks of the caller, so it doesn't matter which threads, locks or devices
    the caller uses. When ``launch`` returns or raises, none of them is left.

    With ``ranks="threads"`` they are threads of this process: they start in a millisecond, stop
    at a debugger's breakpoints, and compute on the CPU. Each has its own World, process groups,
    grad mode and autocast; groups are of the backend ``"threads"``. All else is shared:

    - ``fn``, its arguments and its results are the caller's own objects, not copies. Each rank
      must make its own model and optimizer.
    - torch's random numbers: the ranks draw from one generator, in an order that changes from
      run to run. Use a :class:`torch.Generator` for each rank, or initialise a model on one
      rank; :func:`lockstep.parallelize` hands its parameters to the others.
    - A thread that a rank starts is no rank: it has no World, and sees the caller's groups.
    - Output isn't labelled, and nothing can end a thread that hangs. After a rank has failed,
      the others have ten seconds to end.

    Args:
        fn: The function. It is pickled by ``cloudpickle``, so a lambda, a function inside a
            function or one of a notebook will do. Changes that it makes to the caller's
            variables are lost. (Threads: neither pickled nor lost.)
        nprocs: The number of ranks.
        args: The arguments of ``fn`` after the world, the same for every rank.
        ranks: ``"processes"`` or ``"threads"``.
        num_threads: How many threads each rank computes with; by default the cores that this
            process may use, divided by ``nprocs``.
        output: With ``"labelled"``, the ranks' output goes to ``sys.stdout`` and ``sys.stderr``
            of the caller, line by line, each labelled with its rank. With ``"plain"``, the ranks
            write to the caller's file descriptors 1 and 2 themselves. Threads do so in any case.
        log_dir: A directory in which to keep each rank's output, as ``rank-R.log``.
        grace: How many seconds the ranks have to end by themselves before they are killed, after
            Ctrl-C or the end of this process has asked them to; by default 30. After a rank has
            failed, the others have 3 at most. (Threads can't be killed.)
        restarts: How often ranks may fail without progress, and are all started again: ``fn`` is
            called anew. (Threads can't be.)

    Returns:
        The ranks' results, in the order of ranks.

    Raises:
        BadLaunch: If ``fn`` isn't callable, it or ``args`` can't be pickled, or the numbers make
            no sense.
        RankFailed: If a rank didn't end well: the first that failed. The message has the caller's
            own lines of its traceback, and the attribute ``traceback`` all of it.
        LaunchError: If the ranks couldn't be started.
    """
    if output not in ("labelled", "plain"):
        raise BadLaunch(f"output is {output!r}, but only 'labelled' and 'plain' are known.")
    if output == "plain" and log_dir is not None:
        raise BadLaunch(
            "Plain output doesn't pass through the launcher, so it can't be kept in log_dir "
            "as well. Leave out one of them."
        )
    if ranks not in ("processes", "threads"):
        raise BadLaunch(f"ranks is {ranks!r}, but only 'processes' and 'threads' are known.")
    num_ranks = check_num_ranks(nprocs)
    threads = check_num_threads(num_threads, num_ranks)
    num_restarts = check_restarts(restarts)
    if not callable(fn):
        raise BadLaunch(
            f"launch() was given a {type(fn).__name__} to call: {fn!r}. Give it a function that "
            "takes the world, and pass the function's other arguments as args=(...)."
        )
    if ranks == "threads":
        # Not before it is needed: it imports torch.
        from lockstep.launcher.threads import run_threads

        if log_dir is not None:
            raise BadLaunch(
                "Ranks that are threads write to the caller's own streams, so their output can't "
                "be kept in log_dir. Leave it out, or use ranks='processes'."
            )
        if grace is not None:
            raise BadLaunch(
                "Ranks that are threads can't be killed, after a grace or without one. Leave it "
                "out, or use ranks='processes'."
            )
        if num_restarts:
            raise BadLaunch(
                "Ranks that are threads can't be started again: what a failed one has left of "
                "locks and memory is the caller's too. Leave restarts out, or use "
                "ranks='processes'."
            )
        return run_threads(fn, args, num_ranks, threads)
    job = Job(
        _pickled(fn, args),
        num_ranks,
        threads,
        log_dir=None if log_dir is None else str(absolute_path("log_dir", log_dir)),
        labelled=output == "labelled",
        grace_seconds=check_grace(grace),
        restarts=num_restarts,
    )
    outcome = supervise(job)
    outcome.check()
    return [pickle.loads(result) for result in outcome.results]


def _pickled(fn: Callable[..., object], args: Sequence[object]) -> bytes:
    import cloudpickle

    try:
        return bytes(cloudpickle.dumps((fn, tuple(args))))
    except Exception as error:  # objects raise all kinds of errors when they are pickled
        raise BadLaunch(
            f"{name_of(fn)} and its arguments can't be sent to other processes: {error}. Open "
            "files, locks, sockets and generators can't be pickled: make them inside the function."
        ) from error


def supervise(job: Job) -> JobOutcome:
    """Run ``job`` in a supervisor, copy its output, and return its outcome."""
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            job = job._replace(caller=theirs.fileno())
            descriptor, command, environment = _prepare(job)
            output = subprocess.PIPE if job.labelled else None
            try:
                supervisor = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=environment,
                    pass_fds=(descriptor, theirs.fileno()),
                    start_new_session=True,  # Ctrl-C is the caller's to handle
                )
            except OSError as error:
                raise LaunchError(
                    f"{sys.executable} can't be started: {error.strerror}."
                ) from error
            finally:
                os.close(descriptor)
        with supervisor:
            try:
                answer = _copy_until_end(supervisor, ours)
            except BaseException as error:
                # Errors other than Ctrl-C come from the caller's output streams.
                interrupted = isinstance(error, KeyboardInterrupt)
                supervisor.send_signal(signal.SIGINT if interrupted else signal.SIGTERM)
                for pipe in filter(None, (supervisor.stdout, supervisor.stderr)):
                    pipe.close()
                grace = GRACE_SECONDS if job.grace_seconds is None else job.grace_seconds
                try:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        supervisor.wait(grace + _TO_KILL_SECONDS)
                finally:  # Ctrl-C again
                    supervisor.kill()  # its guardian then ends the ranks
                    supervisor.wait()
                raise
    if not answer:
        raise LaunchError(
            "The process that starts and watches the ranks ended with exit code "
            f"{supervisor.returncode} and without a word. Its output, above, may tell why; if "
            "it is -9, it was killed, and the ranks with it."
        )
    outcome = pickle.loads(answer)
    assert isinstance(outcome, JobOutcome)
    return outcome


def _copy_until_end(supervisor: subprocess.Popen[bytes], connection: socket.socket) -> bytes:
    """Copy the supervisor's output to ``sys.stdout`` and ``sys.stderr``; return its answer."""
    answer = bytearray()
    with selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_READ, answer.extend)
        for pipe, stream in ((supervisor.stdout, sys.stdout), (supervisor.stderr, sys.stderr)):
            if pipe is not None:
                selector.register(pipe, selectors.EVENT_READ, _writer(stream))
        while selector.get_map():
            for key, _ in selector.select():
                data = os.read(key.fd, _READ_BYTES)
                key.data(data)
                if not data:
                    selector.unregister(key.fileobj)
    return bytes(answer)


def _writer(stream: TextIO) -> Callable[[bytes], None]:
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def write(data: bytes) -> None:
        stream.write(decoder.decode(data, final=not data))
        stream.flush()

    return write
