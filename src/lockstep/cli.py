"""The command ``lockstep``.

It answers at once: torch isn't imported here, nor by anything that is imported here.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from lockstep.errors import LockstepError

# "rich" markup would read [rank 0] as a style; markdown leaves it alone.
app = typer.Typer(
    name="lockstep",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Run the command; what goes wrong for a reason that we know is said in one paragraph."""
    try:
        app()
    except LockstepError as error:
        print(f"lockstep: {error}", file=sys.stderr)
        sys.exit(2)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib import metadata  # as slow as all else that a run imports here

        print(f"lockstep {metadata.version('torch-lockstep')}")
        raise typer.Exit


@app.callback()
def lockstep(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print it."),
    ] = False,
) -> None:
    """Synchronous data parallelism for PyTorch: one model, many devices, the same step.

    `lockstep run train.py` runs a script on all of them.
    """


# What follows the script is the script's, even if it looks like an option of ours: hence no
# interspersed options, and no --help among the unknown ones.
@app.command(
    context_settings={"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]}
)
def run(
    program: Annotated[
        list[str],
        typer.Argument(
            metavar="SCRIPT [ARGS]...",
            help="The script, or with -m the module, and what to pass on to it.",
            show_default=False,
        ),
    ],
    module: Annotated[
        bool, typer.Option("-m", help="SCRIPT is the name of a module, as in `python -m`.")
    ] = False,
    num_ranks: Annotated[
        int | None,
        typer.Option(
            "-n",
            "--nprocs",
            metavar="N",
            help="How many ranks to start on this host.",
            show_default="one for each GPU, or 2 where there is none",
        ),
    ] = None,
    num_threads: Annotated[
        int | None,
        typer.Option(
            "--threads",
            metavar="T",
            help="How many threads each rank computes with.",
            show_default="the cores, divided by the ranks",
        ),
    ] = None,
    log_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Keep each rank's output in DIR/rank-R.log as well.",
            show_default=False,
        ),
    ] = None,
    num_hosts: Annotated[
        int, typer.Option("--nnodes", metavar="N", help="On how many hosts this command is given.")
    ] = 1,
    host: Annotated[
        int | None,
        typer.Option(
            "--node-rank",
            metavar="R",
            help="Which of them this is, from 0. Left out, the hosts settle it among themselves.",
            show_default=False,
        ),
    ] = None,
    endpoint: Annotated[
        str | None,
        typer.Option(
            "--rdzv-endpoint",
            metavar="HOST:PORT",
            help="Where the hosts meet: a free port of the first of them.",
            show_default=False,
        ),
    ] = None,
    job_id: Annotated[
        str, typer.Option("--rdzv-id", metavar="ID", help="Tells jobs that meet there apart.")
    ] = "lockstep",
    timeout_seconds: Annotated[
        float,
        typer.Option("--rdzv-timeout", metavar="SECONDS", help="How long hosts wait to meet."),
    ] = 300.0,
) -> None:
    """Run a Python script on several ranks, and leave none behind.

    Each rank runs the script as `python SCRIPT ARGS` would. `lockstep.init()` gives it its
    place among the others. Lines of output are labelled with the rank that wrote them. The
    first rank that fails ends the run, and is reported with its traceback.

    **Two ranks on this machine:**

        lockstep run -n 2 train.py --epochs 3

    **A module, with four threads for each rank:**

        lockstep run -n 2 --threads 4 -m my_package.train

    **Two machines with eight ranks each;** the same on the other one, with --node-rank 1:

        lockstep run --nnodes 2 --node-rank 0 --rdzv-endpoint first:29500 -n 8 train.py
    """
    from lockstep.launcher import job as jobs
    from lockstep.launcher.starting import become_supervisor

    name, argv = program[0], tuple(program[1:])
    ranks = jobs.default_num_ranks() if num_ranks is None else jobs.check_num_ranks(num_ranks)
    threads = jobs.default_num_threads(ranks) if num_threads is None else num_threads
    job = jobs.Job(
        jobs.check_module(jobs.Module(name, argv))
        if module
        else jobs.check_script(jobs.Script(name, argv)),
        ranks,
        jobs.check_num_threads(threads),
        log_dir=None if log_dir is None else str(log_dir.absolute()),
        num_hosts=num_hosts,
    )
    become_supervisor(job)
