"""``lockstep run``: turn this process into the supervisor of a script or a module."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from lockstep.errors import LaunchError
from lockstep.launcher.handover import Descriptors, job_file, supervisor_command
from lockstep.launcher.handover import supervisor_environment as environment
from lockstep.launcher.job import Job


def become_supervisor(job: Job) -> NoReturn:
    """Replace this process by the supervisor of ``job``; it keeps the process id.

    Raises:
        LaunchError: If this platform cannot fork, or the interpreter can't be started.
    """
    if not hasattr(os, "fork"):
        raise LaunchError(
            f"Ranks are made by fork, which {sys.platform} doesn't have. Use Linux, or start the "
            "script with torchrun, under which it runs unchanged."
        )
    descriptors = Descriptors(job_file(job))
    os.set_inheritable(descriptors.job, True)
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execve(sys.executable, supervisor_command(descriptors), environment(os.environ, job))
    except OSError as error:
        raise LaunchError(f"{sys.executable} can't be started: {error.strerror}.") from error
