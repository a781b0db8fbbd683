"""``lockstep run``: from its options to ranks."""

from __future__ import annotations

import os
from typing import NoReturn

from lockstep.cli.plain import RunOptions
from lockstep.launcher import job as jobs
from lockstep.launcher.starting import start


def run(options: RunOptions) -> NoReturn:
    """Check ``options`` and start the ranks; this process becomes their launcher.

    Raises:
        LaunchError: If they can't be started, or the options make no sense.
    """
    argv, threads = options.arguments, options.num_threads
    ranks = options.num_ranks
    num_ranks = jobs.default_num_ranks() if ranks is None else jobs.check_num_ranks(ranks)
    job = jobs.Job(
        jobs.check_module(jobs.Module(options.program, argv))
        if options.module
        else jobs.check_script(jobs.Script(options.program, argv)),
        num_ranks,
        jobs.default_num_threads(num_ranks) if threads is None else jobs.check_num_threads(threads),
        log_dir=None if options.log_dir is None else os.path.abspath(options.log_dir),
        num_hosts=jobs.whole_number(
            options.num_hosts, "The number of hosts", "Leave --nnodes out to run on one."
        ),
    )
    start(
        job,
        host=options.host,
        endpoint=options.endpoint,
        run_id=options.run_id,
        timeout_seconds=options.timeout_seconds,
    )
