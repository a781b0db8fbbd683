"""``lockstep run``, and how a job gets to its supervisor.

The supervisor is a fresh interpreter: it imports nothing but torch and this package before it
forks the ranks, so a program finds none of the command line's libraries imported, and no
thread or lock of a caller's notebook.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
from typing import NoReturn

from lockstep.errors import LaunchError
from lockstep.launcher.job import Job
from lockstep.launcher.processes import MARK, fill_standard_descriptors, flush_standard_streams
from lockstep.world import allocator_environment

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


def run_job(job: Job) -> NoReturn:
    """Replace this process by the supervisor of ``job``; it keeps the process id.

    Raises:
        LaunchError: If the interpreter can't be started.
    """
    if not hasattr(os, "fork"):
        raise LaunchError(
            f"Ranks are made by fork, which {sys.platform} doesn't have. Use Linux, or start the "
            "script with torchrun, under which it runs unchanged."
        )
    fill_standard_descriptors()
    descriptor = write_job(job)
    os.set_inheritable(descriptor, True)
    flush_standard_streams()
    try:
        os.execve(sys.executable, supervisor_command(descriptor), supervisor_environment(job))
    except OSError as error:
        raise LaunchError(f"{sys.executable} can't be started: {error.strerror}.") from error


def write_job(job: Job) -> int:
    """A descriptor of a nameless file that holds ``job``, at its beginning."""
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
    """The job that :func:`write_job` wrote; closes the descriptor."""
    with open(descriptor, "rb") as file:
        job = pickle.load(file)
    assert isinstance(job, Job)
    return job


def supervisor_command(descriptor: int) -> list[str]:
    """The command that runs a supervisor, with this interpreter's options and import path.

    Args:
        descriptor: A file with the job, open in the supervisor.
    """
    options = [f"-W{option}" for option in sys.warnoptions]
    for name, value in sys._xoptions.items():
        options.append(f"-X{name}" if value is True else f"-X{name}={value}")
    options += [option for name, option in _FLAGS.items() if getattr(sys.flags, name)]
    return [sys.executable, *options, "-c", _MAIN, json.dumps(sys.path), str(descriptor)]


def supervisor_environment(job: Job) -> dict[str, str]:
    """The environment of a supervisor.

    The number of threads has to be there before torch is imported: OpenMP reads it once.
    """
    own = {"OMP_NUM_THREADS": str(job.num_threads), MARK: os.urandom(16).hex()}
    return {**allocator_environment(), **os.environ, **own}
