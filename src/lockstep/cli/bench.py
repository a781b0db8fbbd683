"""The commands of ``lockstep bench``, their options and their help."""

from __future__ import annotations

from typing import Annotated

import typer

bench = typer.Typer(no_args_is_help=True, rich_markup_mode="markdown")


@bench.callback()
def benchmarks() -> None:
    """Measure, on this machine, what training in step costs."""


@bench.command()
def collectives(
    ranks: Annotated[
        list[str] | None,
        typer.Option(
            "--ranks",
            metavar="N",
            help="How many processes take part; may be given several times.",
            show_default="2, then 4",
        ),
    ] = None,
    sizes: Annotated[
        str | None,
        typer.Option(
            metavar="SIZES",
            help="Sizes of the tensor, as in 1KiB,16MiB.",
            show_default="1KiB to 256MiB",
        ),
    ] = None,
    rounds: Annotated[str, typer.Option(metavar="R", help="How many turns each one has.")] = "15",
    operations: Annotated[
        list[str] | None,
        typer.Option(
            "--operation",
            metavar="OP",
            help="all_reduce, broadcast, all_gather or reduce_scatter; may be given several "
            "times. For the last two, sizes are those of all ranks' parts together.",
            show_default="all_reduce",
        ),
    ] = None,
    mpiexec: Annotated[
        str, typer.Option(metavar="COMMAND", help="What starts the ranks of MPI.")
    ] = "mpiexec",
    json_to: Annotated[
        str | None,
        typer.Option(
            "--json",
            metavar="FILE",
            help="Write every round's figures to FILE as well; - prints them, and no tables.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Compare collectives in shared memory with Gloo's and, if mpi4py is installed, MPI's.

    One set of processes, of one thread each, holds a Gloo and a shm group. The contenders take
    turns, round after round, so that whatever else the machine does happens to all of them.
    shm is measured with ordinary tensors and with tensors from `group.empty()`, which are
    reduced in place. MPI has processes of its own, and its turns after the others'.

    **What is timed:** before each call every rank writes its whole tensor, as a backward pass
    does with gradients; that isn't counted. Above 64 KiB the ranks then meet, and a call takes
    from when the first rank begins until the last one is through; up to there, calls follow each
    other, and what the slowest rank spends in them counts. Shown are the median and the quartiles
    of the rounds. Ratios are formed in each round by itself.

    **The bound**, from 1 MiB on, is measured beside the all-reduces: the passes over memory that
    an all-reduce in place makes, on all ranks at once but without any meeting. What it takes
    longer than that, meetings and Python take.

    **Small calls** cost what Python costs; the parts of such a call are listed below its table.

    **All of it**, which takes some minutes and, for 256 MiB on 4 ranks, 3 GiB of memory:

        lockstep bench collectives

    **A quick look:**

        lockstep bench collectives --ranks 2 --sizes 1KiB,1MiB,16MiB --rounds 5
    """
    from lockstep.bench.command import collectives as run_collectives
    from lockstep.bench.plan import DEFAULT_SIZES

    run_collectives(
        ranks or ["2", "4"],
        sizes or DEFAULT_SIZES,
        rounds,
        operations or ["all_reduce"],
        mpiexec,
        json_to,
    )
