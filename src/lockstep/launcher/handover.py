"""How a job gets to its supervisor, and what comes back.

The supervisor is a fresh interpreter: it imports nothing but torch and this package before it
forks the ranks, so a program finds none of the command line's libraries imported, and no
thread or lock of a caller's notebook.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from lockstep.launcher.job import Job
from lockstep.launcher.processes import MARK
from lockstep.world.environment import allocator_environment

_FLAGS = {
    "safe_path": "-P",
    "optimize": "-O",
    "dont_write_bytecode": "-B",
    "ignore_environment": "-E",
    "no_user_site": "-s",
}
_MAIN = """\
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from lockstep.launcher.supervisor import main
sys.exit(main())
"""


@dataclass(frozen=True)
class Descriptors:
    """The file descriptors, open in the supervisor, by which it is handed things.

    Attributes:
        job: A file with the job, at its beginning.
        lifeline: A pipe that nobody writes to; its end-of-file says that the caller is gone.
        outcome: A pipe for the :class:`Outcome`, which is printed if there is none.
    """

    job: int
    lifeline: int | None = None
    outcome: int | None = None

    def after_job(self) -> list[int]:
        """Those that are still open when the job has been read."""
        return [fd for fd in (self.lifeline, self.outcome) if fd is not None]


@dataclass(frozen=True)
class Outcome:
    """What came of a job.

    Attributes:
        exit_status: The exit code for the whole run; 0 if all went well.
        results: What each rank's function returned, pickled, if all went well.
        message: What to say, if it didn't.
        rank, exit_code, signal, traceback: As in :class:`~lockstep.errors.RankFailed`; ``rank``
            is None where no rank is to blame.
        at_seconds: When it failed, by the clock on the wall, which hosts have in common.
        lost_a_peer: Whether it failed because another rank was gone.
    """

    exit_status: int
    results: tuple[bytes, ...] = ()
    message: str | None = None
    rank: int | None = None
    exit_code: int | None = None
    signal: str | None = None
    traceback: str | None = None
    at_seconds: float = 0.0
    lost_a_peer: bool = False

    @property
    def blame(self) -> tuple[bool, bool, float]:
        """What sorts outcomes of several hosts: the least is the first failure."""
        return self.rank is None, self.lost_a_peer, self.at_seconds


def job_file(job: Job) -> int:
    """A descriptor of a nameless file that holds ``job``."""
    # A file rather than a pipe: it takes any size, though nobody reads it yet.
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("lockstep-job")
    else:
        import tempfile

        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    with open(descriptor, "wb", closefd=False) as file:
        pickle.dump(job, file)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def read_job(descriptor: int) -> Job:
    """What :func:`job_file` wrote; closes the descriptor."""
    with open(descriptor, "rb") as file:
        job = pickle.load(file)
    assert isinstance(job, Job)
    return job


def supervisor_command(descriptors: Descriptors) -> list[str]:
    """The command that runs a supervisor, with this interpreter's options and import path."""
    options = [f"-W{option}" for option in sys.warnoptions]
    for name, value in sys._xoptions.items():
        options.append(f"-X{name}" if value is True else f"-X{name}={value}")
    options += [option for name, option in _FLAGS.items() if getattr(sys.flags, name)]
    given = (descriptors.job, descriptors.lifeline, descriptors.outcome)
    names = ["" if fd is None else str(fd) for fd in given]
    arguments = [json.dumps(sys.path), str(os.getpid()), *names]
    return [sys.executable, *options, "-c", _MAIN, *arguments]


def read_command(argv: list[str]) -> tuple[int, Descriptors]:
    """The caller's process id and the descriptors, from a supervisor's ``sys.argv``."""
    caller, *names = argv[2:6]
    job, lifeline, outcome = (int(name) if name else None for name in names)
    assert job is not None
    return int(caller), Descriptors(job, lifeline, outcome)


def supervisor_environment(environ: Mapping[str, str], job: Job) -> dict[str, str]:
    """The environment for a supervisor.

    The number of threads has to be there before torch is imported: OpenMP reads it once.
    """
    own = {"OMP_NUM_THREADS": str(job.num_threads), MARK: os.urandom(16).hex()}
    return {**allocator_environment(), **environ, **own}
