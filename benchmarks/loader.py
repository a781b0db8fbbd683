"""Milliseconds a batch of lockstep.DataLoader, and of torch's with its DistributedSampler.

    lockstep run -n 2 -m benchmarks.loader [--rounds 15] [--json FILE]

Each rank gets 128 samples of a batch, in every epoch in another order, and does nothing with them.
Samples are rows of two tensors, from a TensorDataset and from a dataset that isn't torch's, or
images of which some are flipped and all are moved. The two loaders take turns, an epoch each, with
workers that stay; a round's time is that of the slowest rank. With 0 workers, the rank reads its
samples itself.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sized
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import lockstep
from benchmarks.models import spread
from benchmarks.steps import ratios, turn

OURS, TORCH = "lockstep.DataLoader", "DataLoader + DistributedSampler"
SAMPLES_PER_RANK = 128
NUM_WORKERS = (0, 1, 2)


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """Rows of two tensors, one at a time."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        """The number of rows."""
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """One row."""
        return self.x[index], self.y[index]


class Augmented(Dataset[tuple[Tensor, int]]):
    """Images of 3x32x32, flipped by chance and moved by up to 4 pixels."""

    def __init__(self, length: int) -> None:
        self.images = torch.randint(256, (length, 3, 32, 32), dtype=torch.uint8)

    def __len__(self) -> int:
        """The number of images."""
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """One image, another time in another way."""
        image = self.images[index].float().div_(255)
        if torch.rand(()) < 0.5:
            image = image.flip(-1)
        down, right = torch.randint(9, (2,)).tolist()
        padded = torch.nn.functional.pad(image, (4, 4, 4, 4))
        return padded[:, down : down + 32, right : right + 32], index % 10


def datasets(num_ranks: int) -> dict[str, Any]:
    """Datasets of so many samples that an epoch takes some tenths of a second."""
    size = SAMPLES_PER_RANK * num_ranks
    rows = 200 * size
    x, y = torch.randn(rows, 20), torch.randint(10, (rows,))
    return {
        "TensorDataset": TensorDataset(x, y),
        "rows": Rows(x, y),
        "augmented images": Augmented(20 * size),
    }


def epochs_of(
    dataset: Any, num_workers: int, world: lockstep.World
) -> dict[str, Callable[[], None]]:
    """For each loader, what reads one epoch."""
    options = {"num_workers": num_workers, "persistent_workers": num_workers > 0}
    sampler: DistributedSampler[Any] = DistributedSampler(
        dataset, world.world_size, world.rank, shuffle=True
    )
    theirs = DataLoader(dataset, SAMPLES_PER_RANK, sampler=sampler, **options)
    size = SAMPLES_PER_RANK * world.world_size
    ours = lockstep.DataLoader(dataset, size, shuffle=True, seed=0, **options)

    def read(loader: Sized) -> None:
        if loader is theirs:
            sampler.set_epoch(sampler.epoch + 1)
        num_samples = sum(len(batch[1]) for batch in loader)
        assert num_samples == SAMPLES_PER_RANK * len(loader)

    return {OURS: lambda: read(ours), TORCH: lambda: read(theirs)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, help="write every round's figures to this file")
    args = parser.parse_args()
    world = lockstep.init()
    title = f"ms a batch, {world.world_size} ranks, median (quartiles) of {args.rounds}"
    table = Table("samples", "workers", OURS, TORCH, "ours / torch's", title=title)
    found = {}
    for name, dataset in datasets(world.world_size).items():
        num_batches = len(dataset) // (SAMPLES_PER_RANK * world.world_size)
        for num_workers in NUM_WORKERS:
            contenders = epochs_of(dataset, num_workers, world)
            times: dict[str, list[float]] = {each: [] for each in contenders}
            for number in range(args.rounds + 1):
                for each in sorted(contenders, reverse=number % 2 > 0):
                    value = turn(contenders[each], 1) / num_batches
                    if number:  # the first round starts the workers
                        times[each].append(value)
            found[f"{name}, {num_workers} workers"] = times
            figures = [spread(values, 3) for values in times.values()]
            ratio = spread(ratios(times[OURS], times[TORCH]), 3)
            table.add_row(name, str(num_workers), *figures, ratio)
    if world.rank == 0:
        Console(width=140).print(table)
        if args.json is not None:
            args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
