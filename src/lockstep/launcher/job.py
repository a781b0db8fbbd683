"""A job: a program, its ranks and their hosts; from options to a job."""

from __future__ import annotations

import contextlib
import ipaddress
import math
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

from lockstep.errors import BadLaunch
from lockstep.folders import path_given
from lockstep.printable import shown, signal_name
from lockstep.world import num_visible_gpus

# Between SIGTERM to a rank and SIGKILL: if the launcher is ended, so that a checkpoint can be
# written, and if another rank has failed, after which none can be.
GRACE_SECONDS = 30.0
FAILURE_GRACE_SECONDS = 3.0
_DEFAULT_NUM_RANKS = 2
_LAST_CALL_SECONDS = 30  # as torchrun waits
# More than any host has cores or GPUs for. Beyond some 10,000 threads OpenMP crashes, and the
# bookkeeping alone of a number of ranks mistyped by some digits would fill the memory.
_MOST_RANKS = _MOST_THREADS = 4096
_MOST = 1_000_000
_MOST_SCRIPT_BYTES = 1 << 26
# Of a host, or its address of IPv4.
_NAME = re.compile(r"(?=.{1,253}$)(?:[\w-]{1,63}\.)*[\w-]{1,63}\.?")
# What schedulers may be asked to send; others mean something else, or can't be handled.
_STOP_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)


def absolute_path(name: str, folder: object) -> Path:
    """Return the whole path of ``folder``, which was given as ``name``.

    Raises:
        BadLaunch: If that is no path.
    """
    try:
        return Path(path_given(name, folder, "run1")).absolute()
    except (TypeError, ValueError) as error:
        raise BadLaunch(str(error)) from None


class Program(NamedTuple):
    """A file to run as ``python name argv...`` would, or a module as ``python -m`` would."""

    name: str
    argv: tuple[str, ...] = ()
    is_module: bool = False


class Meeting(NamedTuple):
    """Where and how several hosts meet."""

    num_hosts: int  # the most
    host: int | None  # the number of this host, or None to have one given
    address: str  # of the first host, and the port at which it listens for the others
    port: int
    run_id: str  # distinguishes this run from others that meet there
    timeout_seconds: int
    host_timeout_seconds: int  # how long a host may be silent before it is taken for lost
    least_hosts: int  # how few will do; num_hosts if all are needed
    last_call_seconds: int  # how long the first meeting waits for more than these

    @property
    def is_elastic(self) -> bool:
        """Whether fewer hosts than the most may take part."""
        return self.least_hosts < self.num_hosts

    @property
    def endpoint(self) -> str:
        """As it is given on the command line."""
        address = f"[{self.address}]" if ":" in self.address else self.address
        return f"{address}:{self.port}"

    @property
    def mark(self) -> str:
        """Begins the name of a file in memory that each launcher to meet at this port has."""
        return f"lockstep-meeting-{self.port}-"


class Job(NamedTuple):
    """The parameters of a supervisor: the program, the ranks of its host, and their output."""

    program: Program | bytes  # bytes: a function and its arguments, pickled by cloudpickle
    num_ranks: int  # on this host
    num_threads: int  # intra-op threads of each rank
    log_dir: str | None = None  # where each rank's output is kept as well
    labelled: bool = True  # False: the ranks write to the supervisor's own stdout and stderr
    meeting: Meeting | None = None  # None for one host
    live: bool = False  # whether a terminal shows below the output what ranks do
    stdin_rank: int | None = None  # the rank that reads the supervisor's standard input
    full_traceback: bool = False  # whether to show frames of lockstep and torch
    # Between a signal that asks ranks to end and SIGKILL; None for what suits the reason.
    grace_seconds: float | None = None
    # Signals, besides those that end a launcher in any case, by which it asks ranks to stop.
    stop_signals: tuple[int, ...] = ()
    # How often the ranks may fail without progress, and are started again.
    restarts: int = 0
    # How many fewer ranks may go on where so many fail as often as they may.
    num_spare_ranks: int = 0
    # The descriptor of a socket to the process that called launch(), which takes the outcome;
    # end-of-file means that it has ended. None: the outcome is printed.
    caller: int | None = None
    # The context that each rank runs the program in, made there from its rank.
    around: Callable[[int], AbstractContextManager[object]] | None = None


def name_of(function: object) -> str:
    """The name of a function, or of the class of another callable object."""
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def name_of_program(program: Program | bytes) -> str:
    """What is run, as ``lockstep status`` tells it."""
    if isinstance(program, bytes):
        return "a function, by lockstep.launch()"
    return " ".join(["-m"] * program.is_module + [program.name, *program.argv])


def job_of(
    program: Sequence[str],
    *,
    module: bool = False,
    nprocs: str | None = None,
    threads: str | None = None,
    log_dir: str | None = None,
    stdin: str | None = None,
    full_traceback: bool = False,
    live: bool = True,
    grace: str | None = None,
    stop_signal: Sequence[str] = (),
    restarts: str | None = None,
    nnodes: str = "1",
    **meeting: str,
) -> Job:
    """The job that the options of ``lockstep run`` describe.

    Raises:
        BadLaunch: If one of them makes no sense, or Python can't begin to run the script.
    """
    words = program[1:] if program[:1] == ["--"] else program
    if not words:
        raise BadLaunch("SCRIPT is missing: say what to run, as in 'lockstep run -n 2 train.py'.")
    name, *argv = words
    num_restarts = check_restarts(restarts)
    if nprocs is None:
        least_ranks = num_ranks = _num_gpus() or _DEFAULT_NUM_RANKS
        _warn_of_late_options(argv, num_ranks)
    else:
        least_ranks, num_ranks = _range_of_ranks(nprocs, num_restarts)
    num_threads = check_num_threads(threads, num_ranks)
    least_hosts, num_hosts = _range_of_hosts(nnodes, num_restarts)
    if num_hosts > 1 and least_ranks < num_ranks:
        raise BadLaunch(
            f"-n {nprocs} is for runs on one host: with --nnodes each host has as many ranks as it "
            "began with. Give one number of ranks."
        )
    if not module:  # ranks look for modules: Python may have to import a package for that
        _check_script(name)
    elif name.partition(".__main__")[0] == "lockstep":
        raise BadLaunch(
            "The module lockstep is this command itself, and can't be a program that it runs. Name "
            "the module of your program."
        )
    return Job(
        Program(name, tuple(argv), module),
        num_ranks,
        num_threads,
        log_dir=None if log_dir is None else str(absolute_path("--log-dir", log_dir)),
        stdin_rank=_stdin_rank(stdin, least_ranks, num_hosts),
        meeting=_meeting(least_hosts, num_hosts, **meeting),
        full_traceback=full_traceback,
        live=live,
        grace_seconds=check_grace(grace),
        stop_signals=tuple(map(_stop_signal, stop_signal)),
        restarts=num_restarts,
        num_spare_ranks=num_ranks - least_ranks,
    )


def _num_gpus() -> int:
    """The number of GPUs that ranks may use."""
    # Device files are counted rather than CUDA asked: CUDA cannot be used in a process whose
    # parent used it before the fork, and ranks are forked.
    return num_visible_gpus(os.environ, len(list(Path("/dev").glob("nvidia[0-9]*"))))


def _range_of_ranks(value: str, num_restarts: int) -> tuple[int, int]:
    """The fewest ranks and the most, of ``MIN:MAX`` or one number; no more than there are GPUs.

    Raises:
        BadLaunch: If they make no sense.
    """
    least, colon, most = value.partition(":")
    if not colon:
        return (number := check_num_ranks(value)), number
    fewest, number = check_num_ranks(least), check_num_ranks(most)
    if fewest > number:
        raise BadLaunch(
            f"-n {value} has its numbers the wrong way round: the fewest ranks stand before the "
            f"most, as in '-n {number}:{fewest}'."
        )
    if not num_restarts:
        raise BadLaunch(
            f"-n {value} goes on with fewer ranks after failures, and without --restarts there is "
            "only one attempt. Give --restarts N as well, or one number of ranks."
        )
    num_gpus = _num_gpus()
    if 0 < num_gpus < number:
        number = max(fewest, num_gpus)
        print(
            f"lockstep: running {number} ranks of {value}, as there are {num_gpus} GPUs.",
            file=sys.stderr,
        )
    return fewest, number


def _warn_of_late_options(argv: Sequence[str], num_ranks: int) -> None:
    names = {word.partition("=")[0] for word in argv}
    for name in sorted(names & {"-n", "--nprocs", "--nproc-per-node", "--nproc_per_node"}):
        print(
            f"lockstep: running {num_ranks} ranks. '{name}' stands after the script, so the "
            "script gets it; give it before the script to say how many ranks to run.",
            file=sys.stderr,
        )


def check_num_ranks(value: object) -> int:
    """``value`` as a number of ranks; raises BadLaunch as :func:`whole_number` does."""
    advice = "Ask for at least one, as in '-n 2'."
    return whole_number(value, "The number of ranks", advice, at_most=_MOST_RANKS)


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def check_num_threads(value: object, num_ranks: int) -> int:
    """``value`` as a number of threads, by default its part of the cores; may raise BadLaunch."""
    if value is None:
        return max(1, num_cores() // num_ranks)
    advice = "Leave it out to share the cores."
    return whole_number(value, "The number of threads per rank", advice, at_most=_MOST_THREADS)


def check_grace(value: object) -> float | None:
    """``value``, a number or the text of a command line, in seconds; None if it is None.

    Raises:
        BadLaunch: If it is no number from 0 on, or too large for one.
    """
    if value is None:
        return None
    seconds = math.nan
    if isinstance(value, (str, int, float)) and not isinstance(value, bool):
        with contextlib.suppress(ValueError):
            seconds = float(value)
    if not 0 <= seconds <= _MOST:
        raise BadLaunch(
            f"The grace is {value!s:.99}, but seconds from 0 to {_MOST:,} are needed: how long "
            "ranks have to end by themselves."
        )
    return seconds


def _stop_signal(value: str) -> int:
    names = {signal_name(number): number for number in _STOP_SIGNALS}
    number = names.get("SIG" + value.upper().removeprefix("SIG"))
    if number is None:
        raise BadLaunch(
            f"--stop-signal is {value:.99}, but {' or '.join(names)} is needed. SIGTERM, SIGHUP "
            "and SIGINT ask ranks to stop anyway."
        )
    return number


def check_restarts(value: object) -> int:
    """``value`` as a number of restarts, by default 0; may raise BadLaunch."""
    if value is None:
        return 0
    advice = "It is how often ranks may fail without progress, and are started again."
    return whole_number(value, "The number of restarts", advice, at_least=0)


def _stdin_rank(value: str | None, num_ranks: int, num_hosts: int) -> int | None:
    if value is None:
        return 0 if num_hosts == 1 and os.isatty(0) else None
    if value == "none":
        return None
    if num_hosts > 1:
        raise BadLaunch("--stdin is for runs on one host: leave it out, or give --stdin none.")
    advice = "'none' leaves all ranks without."
    return whole_number(value, "--stdin", advice, at_least=0, at_most=num_ranks - 1)


def _range_of_hosts(value: str, num_restarts: int) -> tuple[int, int]:
    """The fewest hosts and the most, of ``MIN:MAX`` or one number; may raise BadLaunch."""
    name, advice = "The number of hosts", "Leave --nnodes out to run on one."
    least, colon, most = value.partition(":")
    fewest = whole_number(least, name, advice)
    number = whole_number(most, name, advice) if colon else fewest
    if fewest > number:
        raise BadLaunch(
            f"--nnodes {value} has its numbers the wrong way round: the fewest hosts stand before "
            f"the most, as in '--nnodes {number}:{fewest}'."
        )
    if fewest < number and not num_restarts:
        raise BadLaunch(
            f"--nnodes {value} goes on with other hosts in new attempts, and without --restarts "
            "there is only one. Give --restarts N as well, or one number of hosts."
        )
    return fewest, number


def _meeting(
    least_hosts: int,
    num_hosts: int,
    node_rank: str | None = None,
    rdzv_endpoint: str | None = None,
    rdzv_id: str = "lockstep",
    rdzv_timeout: str = "300",
    host_timeout: str = "60",
    last_call: str | None = None,
) -> Meeting | None:
    if num_hosts == 1:
        if (node_rank, rdzv_endpoint, last_call) != (None, None, None):
            raise BadLaunch(
                "--node-rank, --rdzv-endpoint and --last-call are for runs on several hosts. Say "
                "with --nnodes on how many."
            )
        return None
    host = None if node_rank is None else whole_number(node_rank, "--node-rank", "", at_least=0)
    seconds = whole_number(rdzv_timeout, "--rdzv-timeout", "It is in seconds.")
    silence = whole_number(host_timeout, "--host-timeout", "It is in seconds.", at_least=2)
    if last_call is not None and least_hosts == num_hosts:
        raise BadLaunch(
            "--last-call is for --nnodes MIN:MAX, where more hosts may come. Leave it out."
        )
    last = whole_number(last_call or str(_LAST_CALL_SECONDS), "--last-call", "", at_least=0)
    if rdzv_endpoint is None:
        raise BadLaunch(
            f"--nnodes {num_hosts} needs --rdzv-endpoint HOST:PORT as well: the name or address "
            "of the first host and a port that is free there, the same on every host."
        )
    if host is not None and host >= num_hosts == least_hosts:
        raise BadLaunch(
            f"--node-rank {host} is too much for --nnodes {num_hosts}: hosts are counted from 0 "
            f"to {num_hosts - 1}."
        )
    address, port = _parts_of(rdzv_endpoint)
    if address.isdecimal():
        raise BadLaunch(
            f"--rdzv-endpoint {rdzv_endpoint} names a host by a number, which is looked up nowhere "
            "but taken for an address of IPv4. Give the host's address."
        )
    return Meeting(num_hosts, host, address, port, rdzv_id, seconds, silence, least_hosts, last)


def _parts_of(endpoint: str) -> tuple[str, int]:
    """Return the host of an endpoint, without brackets, and its port."""
    host, _, port = endpoint.rpartition(":")
    is_in_brackets = host.startswith("[") and host.endswith("]")
    address = host[1:-1] if is_in_brackets else host
    is_ipv6 = False
    with contextlib.suppress(ValueError):
        is_ipv6 = bool(ipaddress.IPv6Address(address)) and address.isprintable()
    is_port = re.fullmatch(r"[0-9]{1,5}", port) is not None and 0 < int(port) < 1 << 16
    if not is_port or not (is_ipv6 or (_NAME.fullmatch(address) and not is_in_brackets)):
        raise BadLaunch(
            f"--rdzv-endpoint {endpoint} isn't of the form HOST:PORT, as in first-host:29500 or "
            "[fd00::1]:29500."
        )
    return address, int(port)


def whole_number(
    value: object, name: str, advice: str, *, at_least: int = 1, at_most: int = _MOST
) -> int:
    """``value``, a number or the text of a command line, as a whole number.

    Raises:
        BadLaunch: If it isn't one, or out of range. The message begins with ``name`` and ends
            with ``advice``.
    """
    number = value
    if isinstance(value, str):
        # int() would also take " 1_0 " and the digits of other scripts.
        is_number = value.removeprefix("-").isdecimal() and value.isascii() and len(value) < 100
        number = int(value) if is_number else None
    if isinstance(number, bool) or not isinstance(number, int) or not at_least <= number <= at_most:
        raise BadLaunch(
            f"{name} is {value!s:.99}, but a whole number from {at_least} to {at_most:,} is "
            f"needed. {advice}"
        )
    return number


def _check_script(script: str) -> None:
    path, name = Path(script), shown(script)
    if path.is_dir():
        if (path / "__main__.py").is_file():
            return
        raise BadLaunch(
            f"{name} is a directory without a __main__.py. Give the script inside it, or -m "
            "and the name of a module."
        )
    try:
        # A pipe or a device may have no end, or be read only once, and each rank reads it.
        if not path.is_file() and path.exists():
            raise BadLaunch(
                f"{name} is a device, a pipe or a socket. Nothing was started: give a file, "
                "which every rank can read."
            )
        if path.stat().st_size > _MOST_SCRIPT_BYTES:
            raise BadLaunch(f"{name} is too large for a Python script. Nothing was started.")
        source = path.read_bytes()
    except OSError as error:
        raise BadLaunch(
            f"The script {name} can't be read: {error.strerror}. "
            f"The current directory is {shown(Path.cwd())}."
        ) from error
    try:
        compile(source, script, "exec", dont_inherit=True)
    except SyntaxError as error:
        where = f", line {error.lineno}" if error.lineno else ""
        line = f"\n    {error.text.strip()}\n" if error.text else " "
        raise BadLaunch(
            f"{name} isn't a Python script that {sys.executable} can run: "
            f"{error.msg}{where}.{line}Nothing was started."
        ) from error
    except ValueError as error:
        raise BadLaunch(  # null bytes, before Python 3.12
            f"{name} isn't a Python script: {error}. Nothing was started; lockstep runs "
            "Python only, and other programs are started from within a script."
        ) from error
