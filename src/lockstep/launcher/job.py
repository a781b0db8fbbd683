"""What to run, and on how many ranks. Nothing here starts anything."""

from __future__ import annotations

import importlib.machinery
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import BadLaunch
from lockstep.world.environment import num_visible_gpus

_DEFAULT_NUM_RANKS = 2
# More than any host has cores or GPUs for. Beyond some 10,000 threads OpenMP crashes, and the
# bookkeeping alone of a number of ranks mistyped by some digits would fill the memory.
_MOST_RANKS = _MOST_THREADS = 4096
_MOST = 1_000_000
_MOST_SCRIPT_BYTES = 1 << 26
_GRACE_SECONDS = 3.0


@dataclass(frozen=True)
class Script:
    """A file to run as ``python path argv...`` would."""

    path: str
    argv: tuple[str, ...] = ()


@dataclass(frozen=True)
class Module:
    """A module to run as ``python -m name argv...`` would."""

    name: str
    argv: tuple[str, ...] = ()


@dataclass(frozen=True)
class Call:
    """A function and its arguments, pickled by cloudpickle, to call with the rank's world."""

    pickled: bytes
    name: str


Program = Script | Module | Call


@dataclass(frozen=True)
class Meeting:
    """Where and how several hosts meet.

    Attributes:
        num_hosts: How many they are.
        host: The number of this host, or None to have one given.
        address, port: Where the first host listens for the others.
        run_id: What tells this run from others that meet there.
        timeout_seconds: How long to wait for the others.
    """

    num_hosts: int
    host: int | None
    address: str
    port: int
    run_id: str
    timeout_seconds: int

    @property
    def endpoint(self) -> str:
        """As it is given on the command line."""
        return f"{self.address}:{self.port}"


@dataclass(frozen=True)
class Job:
    """All that the supervisor of one host has to know.

    Attributes:
        program: What each rank runs.
        num_ranks: How many ranks run on this host.
        num_threads: How many threads each of them computes with.
        log_dir: Where each rank's output is kept as well, or None.
        labelled: Whether output goes through the supervisor, which labels each line. If not,
            the ranks write straight to the supervisor's own stdout and stderr.
        grace_seconds: How long a rank that is asked to end may take before it is killed.
        num_hosts: On how many hosts there is such a supervisor.
        meeting: Where they meet, if there are several.
        stdin_rank: The rank that reads the supervisor's standard input, or None.
        full_traceback: Whether to show the frames of lockstep and torch if a rank fails.
    """

    program: Program
    num_ranks: int
    num_threads: int
    log_dir: str | None = None
    labelled: bool = True
    grace_seconds: float = _GRACE_SECONDS
    num_hosts: int = 1
    meeting: Meeting | None = None
    stdin_rank: int | None = None
    full_traceback: bool = False


def default_num_ranks() -> int:
    """One rank for each GPU, or two where there is none.

    The device files are counted rather than CUDA asked: CUDA cannot be used in a process whose
    parent used it before the fork, and ranks are forked.
    """
    num_gpus = len(list(Path("/dev").glob("nvidia[0-9]*")))
    return num_visible_gpus(os.environ, num_gpus) or _DEFAULT_NUM_RANKS


def default_num_threads(num_ranks: int) -> int:
    """The cores that this process may use, divided by the ranks that share them; at least 1."""
    affinity = getattr(os, "sched_getaffinity", None)
    num_cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    return max(1, num_cores // num_ranks)


def check_num_ranks(value: object) -> int:
    """``value`` as a number of ranks.

    Raises:
        BadLaunch: If it isn't a whole number from 1 up, or absurdly large.
    """
    return whole_number(
        value, "The number of ranks", "Ask for at least one, as in '-n 2'.", at_most=_MOST_RANKS
    )


def check_num_threads(value: object) -> int:
    """``value`` as a number of threads.

    Raises:
        BadLaunch: If it isn't a whole number from 1 up, or absurdly large.
    """
    advice = "Leave it out to share the cores."
    return whole_number(value, "The number of threads per rank", advice, at_most=_MOST_THREADS)


def check_stdin(value: str | None, num_ranks: int, num_hosts: int) -> int | None:
    """The rank that is to have the standard input, from what ``--stdin`` says of it.

    Raises:
        BadLaunch: If there is no such rank, or there are several hosts.
    """
    if value is None:
        return 0 if num_hosts == 1 and os.isatty(0) else None
    if value == "none":
        return None
    if num_hosts > 1:
        raise BadLaunch("--stdin is for runs on one host: leave it out, or give --stdin none.")
    advice = "'none' leaves all ranks without."
    return whole_number(value, "--stdin", advice, at_least=0, at_most=num_ranks - 1)


def whole_number(
    value: object, what: str, advice: str, *, at_least: int = 1, at_most: int = _MOST
) -> int:
    """``value``, which a command line gives as text, as a whole number.

    Raises:
        BadLaunch: If it isn't one, or out of range; ``what`` it is, and ``advice``.
    """
    number = value
    if isinstance(value, str):
        # int() would also take " 1_0 " and the digits of other scripts.
        is_number = value.removeprefix("-").isdecimal() and value.isascii() and len(value) < 100
        number = int(value) if is_number else None
    if isinstance(number, bool) or not isinstance(number, int) or not at_least <= number <= at_most:
        raise BadLaunch(
            f"{what} is {value!s:.99}, but a whole number from {at_least} to {at_most:,} is "
            f"needed. {advice}"
        )
    return number


def check_script(script: Script) -> Script:
    """``script`` if Python can begin to run it.

    Raises:
        BadLaunch: If it doesn't exist, can't be read, or isn't Python.
    """
    path = Path(script.path)
    if path.is_dir() and not (path / "__main__.py").is_file():
        raise BadLaunch(
            f"{script.path} is a directory without a __main__.py. Give the script inside it, or "
            "-m and the name of a module."
        )
    if path.is_dir():
        return script
    try:
        # What isn't a file may have no end, or be read only once, and each rank reads it.
        if not path.is_file() and path.exists():
            raise BadLaunch(
                f"{script.path} is a device, a pipe or a socket. Nothing was started: give a file, "
                "which every rank can read."
            )
        if path.stat().st_size > _MOST_SCRIPT_BYTES:
            raise BadLaunch(f"{script.path} is too large for a Python script. Nothing was started.")
        source = path.read_bytes()
    except OSError as error:
        raise BadLaunch(
            f"The script {script.path} can't be read: {error.strerror}. "
            f"The current directory is {Path.cwd()}."
        ) from error
    _check_source(source, script.path)
    return script


def _check_source(source: bytes, path: str) -> None:
    try:
        compile(source, path, "exec", dont_inherit=True)
    except SyntaxError as error:
        where = f", line {error.lineno}" if error.lineno else ""
        line = f"\n    {error.text.strip()}\n" if error.text else " "
        raise BadLaunch(
            f"{path} isn't a Python script that {sys.executable} can run: "
            f"{error.msg}{where}.{line}Nothing was started."
        ) from error
    except ValueError as error:  # null bytes, before Python 3.12
        raise BadLaunch(
            f"{path} isn't a Python script: {error}. Nothing was started; lockstep runs Python "
            "only, and other programs are started from within a script."
        ) from error


def check_module(module: Module) -> Module:
    """``module`` if there is something of its name.

    Only the first part of the name is looked up: to find more, Python has to import it, and
    what a user's package starts at its import must not be running when ranks are forked. The
    ranks look up the rest.

    Raises:
        BadLaunch: If there isn't.
    """
    if module.name.partition(".__main__")[0] == "lockstep":
        raise BadLaunch(
            "The module lockstep is this command itself, and can't be a program that it runs. Name "
            "the module of your program."
        )
    top, *parts = module.name.split(".")
    # A module is looked up first where the command is given, as by python -m.
    spec = importlib.machinery.PathFinder.find_spec(top, [os.getcwd(), *sys.path]) if top else None
    is_package = spec is not None and spec.submodule_search_locations is not None
    if (spec is None and top not in sys.builtin_module_names) or (parts and not is_package):
        raise BadLaunch(no_such_module(module.name))
    return module


def no_such_module(name: str) -> str:
    """What to say about a module that isn't there."""
    advice = f" To run a file, leave -m out: {name}" if name.endswith(".py") else ""
    return (
        f"There is no module named {name!r}; it was looked for in {os.getcwd()} and among the "
        f"packages that {sys.executable} has installed.{advice}"
    )
