"""A rank, from its fork to its exit code, and the program that it runs.

A rank is forked from the supervisor, which has imported torch, but to the program it must look
like a fresh interpreter, with a process group, signal handlers, streams and random numbers of its
own. After the program, :func:`run_rank` returns, and the interpreter waits for threads and runs
exit handlers as always.
"""

from __future__ import annotations

import builtins
import contextlib
import faulthandler
import fcntl
import importlib.machinery
import importlib.util
import json
import os
import pickle
import runpy
import signal
import socket
import sys
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.abc import InspectLoader
from types import ModuleType

from lockstep.errors import BadLaunch, LaunchError, LockstepError
from lockstep.launcher.failures import Failure, failure_by, program_frames
from lockstep.launcher.job import Job, Program, name_of
from lockstep.launcher.processes import PASSED_SIGNALS, end_with_parent
from lockstep.memory_files import memory_file
from lockstep.status import STACKS_NAME, STACKS_SIGNAL, RankStatus

LENGTH_BYTES = 8  # of the length of a report
_NO_INPUT = (
    "Rank {rank} has no standard input to read from. Give it that of 'lockstep run' by the option "
    "--stdin {rank}; by default rank 0 has it, if it is a terminal."
)
_CALL_NO_INPUT = (
    "Rank {rank} has no standard input to read from, as it is a process of launch(). For a "
    "breakpoint use launch(..., ranks='threads'), or a script and 'lockstep run --stdin {rank}'."
)


def run_rank(
    job: Job,
    supervisor: int,
    connection: socket.socket,
    outputs: Sequence[int],
    signal_mask: Collection[int],
    status: RankStatus,
) -> int:
    """Become a rank after its fork from ``supervisor``, run the program, return the exit code.

    ``connection`` brings variables to add to the environment, and takes the rank's Failure or the
    pickled result of its function. ``outputs`` are descriptors for stdout and stderr, or none for
    the supervisor's own, ``signal_mask`` the signals to block, as when the supervisor was started.
    The supervisor and ``lockstep status`` see in ``status`` what the rank does.
    """
    with connection.makefile("rb") as file:
        line = file.readline()
    if not line:  # the supervisor has ended
        os._exit(1)
    end_with_parent(supervisor, signal.SIGKILL)  # not before: it may have adopted this process
    environment = json.loads(line)
    rank = int(environment["RANK"])
    reads_stdin = rank == job.stdin_rank
    if job.caller is not None:
        os.close(job.caller)
    _leave_supervisor(outputs, reads_stdin)
    os.environ.update(environment)
    import torch

    from lockstep.world import use_store_of_run

    use_store_of_run(os.environ)
    torch.set_num_threads(job.num_threads)
    # numpy 1 makes its global generator when it is imported: the fork copied its state, and all
    # ranks would draw the same. Python reseeds the module random itself, and torch's generator
    # has a fixed first seed.
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed()
    # Not before: a signal would run the supervisor's handlers.
    _unblock_signals(signal_mask)
    _report_to(status, rank)
    pid = os.getpid()
    failure, result = run_program(job.program, rank, reads_stdin, job.around or nullcontext)
    status.enter("end", "")
    # If the supervisor was killed, the end of this rank is near.
    with contextlib.suppress(BrokenPipeError), connection:
        # A process that the program forked may come here too: it can fail the rank, no more.
        if failure is not None or os.getpid() == pid:
            # Its length comes first, as a process of the rank's may hold the connection open.
            report = pickle.dumps((failure, result))
            connection.sendall(len(report).to_bytes(LENGTH_BYTES, "little") + report)
    return 0 if failure is None else failure.exit_code


def _report_to(status: RankStatus, rank: int) -> None:
    """Have ``status`` show what this rank does, and the stacks of its threads to who asks."""
    from torch.optim import Optimizer
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from lockstep import spans
    from lockstep.comm import uncompiled
    from lockstep.world import watch_optimizers

    watch_optimizers()
    steps = spans.StepCounter()

    @uncompiled
    def after_step(optimizer: Optimizer, *rest: object) -> None:
        if steps.counts(optimizer):
            status.count_step()

    register_optimizer_step_post_hook(after_step)
    stacks = memory_file(STACKS_NAME)
    # Each dump is appended, so that a reader may empty the file before it asks for one.
    fcntl.fcntl(stacks, fcntl.F_SETFL, os.O_APPEND)
    faulthandler.register(STACKS_SIGNAL, stacks, all_threads=True)
    status.show_stacks_in(stacks)
    status.begin(rank)
    spans.status = status


def _leave_supervisor(outputs: Sequence[int], reads_stdin: bool) -> None:
    """Take signal handlers, standard streams and an excepthook of this rank's own."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # nohup and a shell's & set these two to be ignored, which is kept.
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    descriptors = dict(enumerate(outputs, start=1))
    if not reads_stdin:
        descriptors[0] = os.open(os.devnull, os.O_RDONLY)
    for number, descriptor in descriptors.items():
        os.dup2(descriptor, number)
        os.close(descriptor)
    for stream in (sys.stdout, sys.stderr) if outputs else ():
        # A pipe is block-buffered by default: lines would come late, and not at all from a
        # rank that is killed.
        if reconfigure := getattr(stream, "reconfigure", None):
            reconfigure(line_buffering=True)
    # The supervisor shows the exception that ends a rank, once it knows which failed first. A
    # hook that the program installs, such as rich's, replaces this one.
    sys.excepthook = lambda kind, error, trace: None
    faulthandler.enable()


def _unblock_signals(signal_mask: Collection[int]) -> None:
    """Block ``signal_mask`` alone, and drop signals that came for the supervisor, or too early."""
    passed = [number for number in PASSED_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    for number in passed:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, signal_mask)
    for number in passed:
        signal.signal(number, signal.SIG_DFL)


def run_program(
    program: Program | bytes,
    rank: int,
    reads_stdin: bool,
    around: Callable[[int], AbstractContextManager[object]],
) -> tuple[Failure | None, bytes | None]:
    """Run ``program``; return its failure, and the pickled result if it is a function."""
    is_call = isinstance(program, bytes)
    try:
        if isinstance(program, bytes):
            return None, _call(program)
        with around(rank):
            (_run_module if program.is_module else _run_script)(program)
    except (SystemExit, KeyboardInterrupt) as error:  # which Python's own hook isn't shown
        failure = failure_by(error, rank, of_function=is_call, has_met=_has_met())
        return failure if failure.exit_code else None, None
    except BaseException as error:  # all that ends the program is reported
        # Raised by this package before the program began, not by a launch() inside the program.
        if isinstance(error, BadLaunch) and program_frames(error.__traceback__) is None:
            return Failure(rank, time.monotonic(), 2, refusal=str(error)), None
        # Of input(), or of a debugger.
        is_of_input = isinstance(error, EOFError) and error.args == ("EOF when reading a line",)
        if not reads_stdin and (is_of_input or type(error).__name__ == "BdbQuit"):
            error.add_note((_CALL_NO_INPUT if is_call else _NO_INPUT).format(rank=rank))
        if isinstance(error, AttributeError) and error.name in ("no_sync", "join"):
            error.add_note(
                "A model that was given to lockstep.parallelize() has no methods but its own: "
                f"write 'with lockstep.{error.name}(model):'. Those of torch's wrapper are in "
                "lockstep.DistributedDataParallel(model)."
            )
        if reason := _reason_of_full_store(error):
            error.add_note(reason)
        failure = failure_by(error, rank, of_function=is_call, has_met=_has_met())
        sys.last_value = error  # as Python has it while it runs exit handlers
        sys.excepthook(type(error), error, error.__traceback__)
        return failure, None
    return None, None


def _reason_of_full_store(error: BaseException) -> str:
    from lockstep.world import reason_of_full_store

    return "" if isinstance(error, LockstepError) else reason_of_full_store(error)


def _has_met() -> bool:
    import torch.distributed as dist

    return dist.is_initialized()


def _call(pickled: bytes) -> bytes:
    import cloudpickle

    from lockstep.world import init

    _pickle_main_by_value()
    function, args = pickle.loads(pickled)
    result = function(init(), *args)
    try:
        return bytes(cloudpickle.dumps(result))
    except Exception as error:
        raise LaunchError(
            f"{name_of(function)}() returned a {type(result).__name__} that can't be pickled "
            f"({error}), so it can't be sent back. Return numbers, tensors or other plain data."
        ) from error


def _pickle_main_by_value() -> None:
    """Let multiprocessing pickle classes and functions of ``__main__`` by value, as launch() does.

    They are the caller's: by name, a data loader's worker wouldn't find them in its ``__main__``.
    """
    from collections import ChainMap
    from multiprocessing import reduction

    import cloudpickle

    # In this order: how multiprocessing pickles a socket and torch a tensor, then cloudpickle.
    reducers = reduction.ForkingPickler._extra_reducers  # type: ignore[attr-defined]
    table = {"dispatch_table": ChainMap(reducers, cloudpickle.Pickler.dispatch_table)}
    bases = (reduction.ForkingPickler, cloudpickle.Pickler)
    reduction.ForkingPickler = type("ForkingPickler", bases, table)  # type: ignore[misc, assignment]


def _run_script(script: Program) -> None:
    """Run a file, or a directory with a ``__main__.py``, as ``python path`` does."""
    path = os.path.abspath(script.name)
    sys.argv[:] = [script.name, *script.argv]
    if os.path.isdir(path):
        _replace_first_path_entry(None)
        runpy.run_path(path, run_name="__main__")
        return
    _replace_first_path_entry(os.path.dirname(os.path.realpath(path)))
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    code = loader.source_to_code(loader.get_data(path), path)
    main = _new_main(path)
    main.__loader__ = loader
    exec(code, main.__dict__)


def _run_module(module: Program) -> None:
    """Run a module, or the ``__main__`` of a package, as ``python -m name`` does.

    Raises:
        BadLaunch: If there is no such module, or it can't be run.
    """
    _replace_first_path_entry(os.getcwd())
    sys.argv[:] = ["-m", *module.argv]  # as python has it while it looks for the module
    spec, name = _find(module.name), module.name
    if spec is None:
        advice = f" To run a file, leave -m out: {name}" if name.endswith(".py") else ""
        raise BadLaunch(
            f"There is no module named {name!r}; it was looked for in {os.getcwd()} and among the "
            f"packages that {sys.executable} has installed.{advice}"
        )
    if spec.submodule_search_locations is not None:
        spec = _find(f"{name}.__main__")
        if spec is None:
            raise BadLaunch(
                f"{name!r} is a package without a __main__ module, so it can't be run. Name one "
                f"of its modules, as in '-m {name}.train'."
            )
    loader = spec.loader
    code = loader.get_code(spec.name) if isinstance(loader, InspectLoader) else None
    if code is None:
        raise BadLaunch(f"The module {name!r} isn't written in Python, so it can't be run.")
    main = _new_main(spec.origin or "")
    main.__spec__, main.__loader__, main.__package__ = spec, loader, spec.parent
    sys.argv[0] = spec.origin or ""
    exec(code, main.__dict__)


def _find(name: str) -> importlib.machinery.ModuleSpec | None:
    top, *parts = name.split(".")
    try:
        spec = importlib.util.find_spec(top)
        # Of a module that is no package, Python would look for parts too, and run it for that.
        if parts and spec is not None and spec.submodule_search_locations is None:
            return None
        return importlib.util.find_spec(name) if parts else spec
    except ModuleNotFoundError as error:
        # An import that fails inside the user's package is the user's traceback to see.
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
    except ValueError:  # a module without a spec, or a name such as ".train"
        pass
    return None


def _new_main(path: str) -> ModuleType:
    main = ModuleType("__main__")
    main.__dict__.update(__file__=path, __builtins__=builtins, __cached__=None)
    if isinstance(mains := sys.modules["__main__"], MainOfRank):
        mains.put(main)
    else:
        sys.modules["__main__"] = main
    return main


class MainOfRank(ModuleType):
    """What ``sys.modules`` has as ``__main__`` while ranks are threads: leads to a rank's own.

    Args:
        before: What was there before, and is there for other threads.
        this_rank: Returns what differs between ranks, and is the same in all threads of one.
    """

    def __init__(self, before: ModuleType, this_rank: Callable[[], int]) -> None:
        of_this = object.__getattribute__(self, "__dict__")
        of_this.update(before=before, mains={}, this_rank=this_rank)

    def put(self, main: ModuleType) -> None:
        """Let ``main`` be that of this rank."""
        of_this = object.__getattribute__(self, "__dict__")
        of_this["mains"][of_this["this_rank"]()] = main

    def __getattribute__(self, name: str) -> object:
        if name == "put":
            return object.__getattribute__(self, name)
        return getattr(_main_of(self), name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(_main_of(self), name, value)

    def __delattr__(self, name: str) -> None:
        delattr(_main_of(self), name)


def _main_of(mains: MainOfRank) -> ModuleType:
    state = object.__getattribute__(mains, "__dict__")
    found: ModuleType = state["mains"].get(state["this_rank"](), state["before"])
    return found


def _replace_first_path_entry(directory: str | None) -> None:
    """Replace the launcher's own directory, which the program must not see, by ``directory``."""
    if not sys.flags.safe_path:  # with -P, Python put nothing there
        sys.path[:1] = [] if directory is None else [directory]
