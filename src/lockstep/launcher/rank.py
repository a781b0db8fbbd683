"""What a rank does, from the fork that makes it to the exit code that it ends with.

A rank is forked from the supervisor, which has imported torch, but must be to the program what
a fresh interpreter is: a process group, signal handlers, a standard input, streams and random
numbers of its own. When the program is over, :func:`run_rank` returns, and the interpreter
ends as it always does: it waits for threads and runs exit handlers.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import sys
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from lockstep.errors import BadLaunch, LaunchError
from lockstep.launcher.job import Call, Module, Program, Script
from lockstep.launcher.processes import end_with_parent
from lockstep.launcher.program import run_module, run_script
from lockstep.launcher.tracebacks import Told, program_frames, tell
from lockstep.launcher.verdict import Report

REPORT_LENGTH_BYTES = 8


@dataclass(frozen=True)
class RankStart:
    """What a rank is born with.

    Attributes:
        rank: Its number among all ranks.
        environment: The environment variables to add.
        num_threads: How many threads it computes with.
        stdin: Whether it reads the supervisor's standard input; if not, it has none.
        stdout, stderr: File descriptors to write to, or None to write where the supervisor does.
        report: The file descriptor that its :class:`Report` goes to.
        signal_mask: The signals to block, which is what the supervisor was started with.
    """

    rank: int
    environment: Mapping[str, str]
    num_threads: int
    stdin: bool
    stdout: int | None
    stderr: int | None
    report: int
    signal_mask: Collection[int]


def run_rank(start: RankStart, program: Program, supervisor: int) -> int:
    """Become a rank, run ``program``, report how it went.

    Args:
        start: What makes this rank this rank.
        program: What to run.
        supervisor: The process that forked this one.

    Returns:
        The exit code to end with.
    """
    end_with_parent(supervisor, signal.SIGKILL)
    _become_a_process_of_its_own(start)
    # Only now, and not while it was the supervisor still, may a signal interrupt it.
    signal.pthread_sigmask(signal.SIG_SETMASK, start.signal_mask)
    report = _run(program, start)
    if report.exit_code != 0 or report.result is not None:
        _send(report, start.report)
    os.close(start.report)
    return report.exit_code


def _become_a_process_of_its_own(start: RankStart) -> None:
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    # What a shell's nohup or & has asked to ignore stays ignored.
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    _redirect(start)
    # The supervisor tells of the exception that ends a rank, once it knows which failed first. A
    # hook of the program's own, such as rich's, is put in this one's place.
    sys.excepthook = lambda kind, error, trace: None
    os.environ.update(start.environment)
    _refresh_libraries(start.num_threads)
    faulthandler.enable()


def _redirect(start: RankStart) -> None:
    if not start.stdin:
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
    for descriptor, standard, stream in (
        (start.stdout, 1, sys.stdout),
        (start.stderr, 2, sys.stderr),
    ):
        if descriptor is None:
            continue
        os.dup2(descriptor, standard)
        os.close(descriptor)
        # A pipe is block-buffered by default: lines would come late, and not at all from a
        # rank that is killed.
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(line_buffering=True)


def _refresh_libraries(num_threads: int) -> None:
    import torch

    torch.set_num_threads(num_threads)
    # If numpy has made its global generator (numpy 1 does when it is imported), the fork copied
    # its state: all ranks would draw the same. That of the module random is reseeded by Python
    # itself, and torch's has a fixed first seed.
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()


def _run(program: Program, start: RankStart) -> Report:
    try:
        result = _execute(program)
    except SystemExit as error:
        return _report_of_exit(error, program)
    except KeyboardInterrupt:
        return _report(128 + signal.SIGINT)
    except BadLaunch as error:
        # Raised by this package before the program began, or by a launch() inside the program.
        if program_frames(error.__traceback__) is None:
            return _report(2, advice=str(error))
        return _report_of_exception(error, program)
    except BaseException as error:  # whatever ends the program has to be reported
        if not start.stdin and _wanted_input(error):
            error.add_note(_no_input(start.rank, program))
        if isinstance(error, AttributeError) and error.name in ("no_sync", "join"):
            error.add_note(
                "A model that was given to lockstep.parallelize() has no methods but its own: "
                f"write 'with lockstep.{error.name}(model):'. Those of torch's wrapper are in "
                "lockstep.DistributedDataParallel(model)."
            )
        return _report_of_exception(error, program)
    return _report(0, result=result)


def _execute(program: Program) -> bytes | None:
    match program:
        case Script():
            run_script(program)
        case Module():
            run_module(program)
        case Call():
            return _call(program)
    return None


def _call(program: Call) -> bytes:
    import cloudpickle

    from lockstep.world import init

    _let_spawned_processes_have_what_is_in_main()
    function, args = pickle.loads(program.pickled)
    result = function(init(), *args)
    try:
        return bytes(cloudpickle.dumps(result))
    except Exception as error:
        raise LaunchError(
            f"{program.name}() returned a {type(result).__name__} that can't be pickled "
            f"({error}), so it can't be sent back. Return numbers, tensors or other plain data."
        ) from error


def _let_spawned_processes_have_what_is_in_main() -> None:
    """Let multiprocessing pickle classes and functions of ``__main__`` by value, as launch() does.

    They are the caller's: this process's ``__main__`` doesn't have them, nor has that of a data
    loader's worker, which would look for them by name.
    """
    from collections import ChainMap
    from multiprocessing import reduction

    import cloudpickle

    # What it reads when it is made: multiprocessing's own ways to pickle a socket, torch's for a
    # tensor, and then those of cloudpickle.
    own = reduction.ForkingPickler._extra_reducers  # type: ignore[attr-defined]
    table = {"dispatch_table": ChainMap(own, cloudpickle.Pickler.dispatch_table)}
    bases = (reduction.ForkingPickler, cloudpickle.Pickler)
    reduction.ForkingPickler = type("ForkingPickler", bases, table)  # type: ignore[misc, assignment]


def _report_of_exit(error: SystemExit, program: Program) -> Report:
    """What Python makes of ``sys.exit(...)``: a number is the exit code, all else a message."""
    code = error.code
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    # As an exit code has 8 bits; and a function that exits hasn't returned.
    status = (code or 0) & 0xFF or (1 if isinstance(program, Call) else 0)
    return _report(status, told=tell(error, _hint(program)) if status else None)


def _report_of_exception(error: BaseException, program: Program) -> Report:
    report = _report(1, told=tell(error, _hint(program)))
    sys.last_value = error  # as Python has it while it runs exit handlers
    sys.excepthook(type(error), error, error.__traceback__)
    return report


def _hint(program: Program) -> str:
    if isinstance(program, Call):
        return "; the error's attribute traceback has them"
    return "; --full-traceback shows them"


def _wanted_input(error: BaseException) -> bool:
    """Whether ``error`` is what ``input()`` or a debugger make of an empty standard input."""
    is_from_input = isinstance(error, EOFError) and error.args == ("EOF when reading a line",)
    return is_from_input or type(error).__name__ == "BdbQuit"


def _no_input(rank: int, program: Program) -> str:
    if isinstance(program, Call):
        return (
            f"Rank {rank} has no standard input to read from, as it is a process of launch(). For "
            "a breakpoint use launch(..., ranks='threads'), or a script and 'lockstep run --stdin "
            f"{rank}'."
        )
    return (
        f"Rank {rank} has no standard input to read from. Give it that of 'lockstep run' by the "
        f"option --stdin {rank}; by default rank 0 has it, if it is a terminal."
    )


def _report(
    exit_code: int,
    *,
    told: Told | None = None,
    advice: str | None = None,
    result: bytes | None = None,
) -> Report:
    return Report(time.monotonic(), exit_code, told, advice, result)


def _send(report: Report, descriptor: int) -> None:
    """Write ``report``, and how long it is: what the rank forked may hold the pipe open."""
    payload = pickle.dumps(report)
    data = memoryview(len(payload).to_bytes(REPORT_LENGTH_BYTES, "little") + payload)
    try:
        while data:
            data = data[os.write(descriptor, data) :]
    except BrokenPipeError:  # the supervisor was killed; the end of this rank is near
        pass
