"""Milliseconds a step of models that are one large table: ours, torch's DDP, and no communication.

    lockstep run -n 2 -m benchmarks.embeddings [--rounds 15] [--json FILE]
    python -m benchmarks.embeddings             # one rank: what it costs to be parallel alone
    lockstep run -n 2 -m benchmarks.embeddings --sizes 4 8 16   # MiB: where rows begin to pay

The contenders take turns, as in ``benchmarks.steps``, and have the same allocator; each has eight
batches, one after another, so that each step touches other rows than the last. Torch's DDP is over
Gloo. Gradients are kept between steps by none, and made zero by ``zero_grad()``, as by default.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.optim import SGD, AdamW, Optimizer, SparseAdam

import lockstep
from benchmarks.models import Workload, spread
from benchmarks.steps import Wrap, measure, ratios, trained_as
from lockstep.grad import row_bucket

BARE, OURS, SHARDED, DDP = "no communication", "parallelize", "shard_optimizer", "torch DDP, gloo"
NUM_BATCHES = 8


class Case(NamedTuple):
    """A table, and what trains it."""

    name: str
    build: Callable[[], nn.Module]
    size: tuple[int, ...]  # of a rank's batch of indices
    optimizer: Callable[..., Optimizer]
    options: dict[str, Any]

    def train(self, model: nn.Module) -> Optimizer:
        """The optimizer of a model."""
        return self.optimizer(model.parameters(), **self.options)

    def workload(self) -> Workload:
        """The model with batches of random rows, and a loss that reads every number."""
        model = self.build()
        num_rows, width = next(iter(model.parameters())).shape
        outputs = (
            (self.size[0], width) if isinstance(model, nn.EmbeddingBag) else (*self.size, width)
        )

        def batch(_: int) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.randint(num_rows, self.size), torch.randn(outputs)

        return Workload(self.name, self.build, batch, nn.functional.mse_loss, NUM_BATCHES)


BAGS = functools.partial(nn.EmbeddingBag, 500_000, 32, mode="sum")
SPARSE_BAGS = functools.partial(BAGS, sparse=True)
TOKENS = functools.partial(nn.Embedding, 100_000, 64)
CASES = [
    Case("500k x 32, SGD", BAGS, (256, 20), SGD, {"lr": 0.1}),
    Case("500k x 32, SGD, momentum", BAGS, (256, 20), SGD, {"lr": 0.1, "momentum": 0.9}),
    Case("100k x 64, AdamW", TOKENS, (64, 32), AdamW, {}),
    Case("100k x 64, AdamW, fused", TOKENS, (64, 32), AdamW, {"fused": True}),
    Case("500k x 32, sparse, SGD", SPARSE_BAGS, (256, 20), SGD, {"lr": 0.1}),
    Case("500k x 32, sparse, SparseAdam", SPARSE_BAGS, (256, 20), SparseAdam, {}),
]  # fmt: skip


def contenders(case: Case) -> dict[str, Wrap]:
    """The contenders. Every rank must call it, as it creates process groups."""
    alone = trained_as(lambda model: model, case.train)
    if not dist.is_initialized():
        return {BARE: alone, OURS: trained_as(lockstep.parallelize, case.train)}
    # Each model has a group of its own: else backwards are asked whether they reach the others too.
    apart, beside = (
        functools.partial(lockstep.parallelize, process_group=dist.new_group(backend="shm"))
        for _ in range(2)
    )
    ddp = functools.partial(
        nn.parallel.DistributedDataParallel, process_group=dist.new_group(backend="gloo")
    )

    def shard(model: nn.Module) -> Optimizer:
        return lockstep.shard_optimizer(case.train(model))

    return {
        BARE: alone,
        OURS: trained_as(apart, case.train),
        SHARDED: trained_as(beside, shard),
        DDP: trained_as(ddp, case.train),
    }


def by_size(mebibytes: float) -> tuple[Case, dict[str, Wrap]]:
    """Bags of a table of this size, and contenders: with rows, and with whole gradients."""
    num_rows = round(mebibytes * 2**20 / 128)
    bags = functools.partial(nn.EmbeddingBag, num_rows, 32, mode="sum")
    case = Case(f"{mebibytes:g} MiB", bags, (256, 20), SGD, {"lr": 0.1})

    def parallel(model: nn.Module, least: float) -> nn.Module:
        row_bucket.MIN_TABLE_BYTES = least  # read when the model is made parallel
        return lockstep.parallelize(model, process_group=dist.new_group(backend="shm"))

    kinds = {BARE: lambda model: model}
    kinds |= {"rows": functools.partial(parallel, least=0)}
    kinds |= {"whole gradients": functools.partial(parallel, least=math.inf)}
    return case, {name: trained_as(wrap, case.train) for name, wrap in kinds.items()}


def compare_sizes(sizes: list[float], rounds: int, rank: int) -> None:
    table = Table("table", "no communication", "rows", "whole gradients", "rows / whole")
    for case, wraps in map(by_size, sizes):
        times = measure(case.workload(), wraps, rounds, rank)
        ratio = spread(ratios(times["rows"], times["whole gradients"]))
        table.add_row(case.name, *map(spread, times.values()), ratio)
    if rank == 0:
        Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, help="write every round's figures to this file")
    parser.add_argument("--cases", default="", help="those whose names contain this")
    parser.add_argument(
        "--sizes", type=float, nargs="+", help="of tables, in MiB, in place of these"
    )
    args = parser.parse_args()
    world = lockstep.init()
    if args.sizes:
        compare_sizes(args.sizes, args.rounds, world.rank)
        return
    found, table = {}, None
    for case in (case for case in CASES if args.cases in case.name):
        wraps = contenders(case)
        ours = [name for name in (OURS, SHARDED) if name in wraps]
        pairs = [*((name, BARE) for name in ours), *((DDP, name) for name in ours if DDP in wraps)]
        times = measure(case.workload(), wraps, args.rounds, world.rank)
        found[case.name] = times
        table = table or Table(
            "table", *wraps, *(f"{a} / {b}" for a, b in pairs),
            title=f"ms a step, {world.world_size} ranks, {torch.get_num_threads()} threads each: "
            f"median (quartiles) of {args.rounds} rounds",
        )  # fmt: skip
        table.add_row(
            case.name,
            *(spread(values) for values in times.values()),
            *(spread(ratios(times[a], times[b])) for a, b in pairs),
        )
    if world.rank == 0 and table is not None:
        Console(width=220).print(table)
        if args.json:
            args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
