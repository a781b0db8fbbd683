"""``lockstep demo``, after its options are parsed."""

from __future__ import annotations

from rich.console import Console

from lockstep.demo.datasets import load
from lockstep.demo.training import (
    GLOBAL_BATCH_SIZE,
    global_batches,
    largest_difference,
    train,
    train_exactly,
)
from lockstep.errors import BadLaunch
from lockstep.launcher import check_num_ranks, launch, whole_number
from lockstep.world import init

# Far above the rounding errors of one epoch in float64, and far below the difference of 1e-4 that a
# single sample makes which is lost or counted twice.
TOLERANCE = 1e-9


def demo(nprocs: str, epochs: str, seed: int, data: str) -> bool:
    """Train on ``nprocs`` processes, then show that splitting has changed nothing.

    Returns:
        Whether one more epoch on ``nprocs`` processes and in one gave the same parameters.

    Raises:
        BadLaunch: If a number makes no sense, or there is no such data.
        MissingExtra: If the data needs a package that isn't installed.
    """
    num_ranks = check_num_ranks(nprocs)
    num_epochs = whole_number(epochs, "--epochs", "15 train the network well.")
    if not 0 <= seed < 2**63:
        raise BadLaunch(f"--seed is {seed}, but must be from 0 to 2**63 - 1.")
    if num_ranks > GLOBAL_BATCH_SIZE:
        raise BadLaunch(
            f"--nprocs is {num_ranks}, but a batch of {GLOBAL_BATCH_SIZE} images can't be split "
            f"over more than {GLOBAL_BATCH_SIZE} ranks."
        )
    console = Console()
    try:
        digits = load(data)
    except ValueError as error:
        raise BadLaunch(str(error)) from error
    processes = "one process" if num_ranks == 1 else f"{num_ranks} processes"
    console.print(
        f"Training a ConvNet on {digits.name}: {len(digits.train_labels):,} images to train on, "
        f"{len(digits.test_labels):,} to test with, {GLOBAL_BATCH_SIZE} a step over {processes}.",
        highlight=False,
    )
    trained = launch(train, num_ranks, (digits, num_epochs, seed), output="plain")[0]
    alone = train_exactly(trained.start, digits, init(device="cpu"), seed, num_ranks)
    difference = largest_difference(trained.end, alone)
    num_parameters = sum(value.numel() for value in alone.values())
    num_batches = len(global_batches(digits, num_ranks, seed))
    is_same = difference < TOLERANCE
    console.print(
        f"\nOne more epoch from there, dropout off, in float64, on {processes} and "
        f"in one, the same {num_batches} batches: the largest difference in {num_parameters:,} "
        f"parameters is [bold]{difference:.1e}[/bold]. "
        + (
            "[green]Nothing was lost by splitting.[/green]"
            if is_same
            else f"[red]It should be below {TOLERANCE:.0e}: please report this.[/red]"
        ),
        highlight=False,
    )
    return is_same
