"""``lockstep run``: turn this process into the supervisor of a script or a module."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import NoReturn

from lockstep.errors import BadLaunch, LaunchError
from lockstep.launcher.handover import Descriptors, job_file, supervisor_command
from lockstep.launcher.handover import supervisor_environment as environment
from lockstep.launcher.job import Job, whole_number
from lockstep.launcher.meeting import check_meeting
from lockstep.launcher.processes import fill_standard_descriptors, flush_standard_streams


def start(
    job: Job, *, host: str | None, endpoint: str | None, run_id: str, timeout_seconds: str
) -> NoReturn:
    """Run ``job`` on this host, or as the part of this host in a run on several.

    Raises:
        BadLaunch: If the options don't fit each other.
        LaunchError: If the ranks can't be started.
    """
    if not hasattr(os, "fork"):
        raise LaunchError(
            f"Ranks are made by fork, which {sys.platform} doesn't have. Use Linux, or start the "
            "script with torchrun, under which it runs unchanged."
        )
    if job.num_hosts == 1:
        if host is not None or endpoint is not None:
            raise BadLaunch(
                "--node-rank and --rdzv-endpoint are for runs on several hosts. Say with --nnodes "
                "on how many."
            )
        become_supervisor(job)
    meeting = check_meeting(
        num_hosts=job.num_hosts,
        host=None if host is None else whole_number(host, "--node-rank", "", at_least=0),
        endpoint=endpoint,
        run_id=run_id,
        timeout_seconds=whole_number(timeout_seconds, "--rdzv-timeout", "It is in seconds."),
    )
    become_supervisor(replace(job, meeting=meeting))


def become_supervisor(job: Job) -> NoReturn:
    """Replace this process by the supervisor of ``job``; it keeps the process id.

    Raises:
        LaunchError: If the interpreter can't be started.
    """
    fill_standard_descriptors()
    descriptors = Descriptors(job_file(job))
    os.set_inheritable(descriptors.job, True)
    flush_standard_streams()
    try:
        os.execve(sys.executable, supervisor_command(descriptors), environment(os.environ, job))
    except OSError as error:
        raise LaunchError(f"{sys.executable} can't be started: {error.strerror}.") from error
