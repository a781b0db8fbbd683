"""The commands of ``lockstep``, their options and their help."""

from __future__ import annotations

from typing import Annotated

import typer

from lockstep.cli.bench import bench
from lockstep.cli.plain import RunOptions

# "rich" markup would read [rank 0] as a style; markdown leaves it alone.
app = typer.Typer(
    name="lockstep",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(bench, name="bench")


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib import metadata

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
        str, typer.Argument(metavar="SCRIPT", help="The script or, with -m, the module to run.")
    ],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="ARGS", help="What to pass on to it.", show_default=False),
    ] = None,
    module: Annotated[
        bool, typer.Option("-m", help="SCRIPT is the name of a module, as in `python -m`.")
    ] = False,
    num_ranks: Annotated[
        str | None,
        typer.Option(
            "-n",
            "--nprocs",
            metavar="N",
            help="How many ranks to start on this host.",
            show_default="one for each GPU, or 2 where there is none",
        ),
    ] = None,
    num_threads: Annotated[
        str | None,
        typer.Option(
            "--threads",
            metavar="T",
            help="How many threads each rank computes with.",
            show_default="the cores, divided by the ranks",
        ),
    ] = None,
    log_dir: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Keep each rank's output in DIR/rank-R.log as well.",
            show_default=False,
        ),
    ] = None,
    num_hosts: Annotated[
        str, typer.Option("--nnodes", metavar="N", help="On how many hosts this command is given.")
    ] = "1",
    host: Annotated[
        str | None,
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
    run_id: Annotated[
        str, typer.Option("--rdzv-id", metavar="ID", help="Tells jobs that meet there apart.")
    ] = "lockstep",
    timeout_seconds: Annotated[
        str,
        typer.Option("--rdzv-timeout", metavar="SECONDS", help="How long hosts wait to meet."),
    ] = "300",
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
    from lockstep.cli import running

    options = RunOptions(
        program,
        tuple(arguments or ()),
        module,
        num_ranks,
        num_threads,
        log_dir,
        num_hosts,
        host,
        endpoint,
        run_id,
        timeout_seconds,
    )
    running.run(options)


@app.command()
def demo(
    num_ranks: Annotated[
        str, typer.Option("-n", "--nprocs", metavar="N", help="How many processes train.")
    ] = "2",
    epochs: Annotated[
        str, typer.Option(metavar="E", help="How often to go through the training images.")
    ] = "15",
    seed: Annotated[int, typer.Option(help="What all that is random is drawn from.")] = 1234,
    data: Annotated[
        str,
        typer.Option(
            metavar="digits|mnist|FOLDER",
            help="scikit-learn's 1,797 digits; MNIST, downloaded by torchvision; or a folder with "
            "a sub-folder of PNG or JPEG images for each class.",
        ),
    ] = "digits",
) -> None:
    """Train a small network on handwritten digits, over several processes.

    Then show that nothing was lost by splitting: one more epoch, on all processes and in one,
    and the largest difference between the two sets of parameters.
    """
    from lockstep.demo.command import demo as run_demo

    raise typer.Exit(0 if run_demo(num_ranks, epochs, seed, data) else 1)
