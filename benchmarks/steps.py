"""Milliseconds a training step: ours, torch's DDP, and no communication, side by side.

    lockstep run -n 2 -m benchmarks.steps [--rounds 15] [--json FILE]
    python -m benchmarks.steps                  # one rank: what it costs to be parallel alone

Every rank holds one replica for each contender. They take turns of some steps each, round after
round, so that other load of the machine affects all of them. The time of a round is that of the
slowest rank. "By hand" is a lower bound on this backend if backward leaves no core idle: after
backward, every gradient is copied once to memory that is reduced in place, and all of it is reduced
in one call.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.optim import Optimizer

import lockstep
from benchmarks.models import WORKLOADS, Workload, spread

SECONDS_PER_TURN = 0.25
WARM_UP_STEPS = 5


class Contender(NamedTuple):
    """A model, its optimizer, and what to call between backward and step."""

    model: nn.Module
    optimizer: Optimizer
    after_backward: Callable[[], None] = lambda: None


Wrap = Callable[[nn.Module], Contender]


def momentum(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def contenders() -> dict[str, Wrap]:
    """The contenders. Every rank must call it, as it creates process groups."""
    if not dist.is_initialized():
        return {
            "bare": trained_as(lambda model: model),
            "parallelize": trained_as(lockstep.parallelize),
            "DistributedDataParallel": trained_as(lockstep.DistributedDataParallel),
        }
    world, backend = dist.group.WORLD, dist.get_backend()
    gloo = world if backend == "gloo" else dist.new_group(backend="gloo")
    wraps = {"no communication": trained_as(lambda model: model)}
    if backend != "gloo":
        wraps[f"lockstep, {backend}"] = trained_as(lockstep.parallelize)
    wraps["lockstep, gloo"] = trained_as(
        lambda model: lockstep.parallelize(model, process_group=gloo)
    )
    wraps["torch DDP, gloo"] = trained_as(
        lambda model: nn.parallel.DistributedDataParallel(
            model, process_group=gloo, gradient_as_bucket_view=True
        )
    )
    wraps[f"by hand, {backend}"] = lambda model: Contender(
        model, momentum(model), reducer_by_hand(model, world)
    )
    return wraps


def trained_as(
    wrap: Callable[[nn.Module], nn.Module], optimizer: Callable[[nn.Module], Optimizer] = momentum
) -> Wrap:
    def wrapped(model: nn.Module) -> Contender:
        model = wrap(model)
        return Contender(model, optimizer(model))

    return wrapped


def reducer_by_hand(model: nn.Module, group: dist.ProcessGroup) -> Callable[[], None]:
    parameters = list(model.parameters())
    sizes = [parameter.numel() for parameter in parameters]
    in_place = hasattr(group, "empty")
    flat = group.empty(sum(sizes)) if in_place else torch.empty(sum(sizes))
    operation = dist.ReduceOp.AVG if in_place else dist.ReduceOp.SUM  # Gloo has no mean
    views = [
        one.view_as(parameter) for one, parameter in zip(flat.split(sizes), parameters, strict=True)
    ]

    def reduce() -> None:
        torch._foreach_copy_(views, [parameter.grad for parameter in parameters])
        dist.all_reduce(flat, operation, group=group)
        for parameter, view in zip(parameters, views, strict=True):
            parameter.grad = view

    return reduce


def stepper(workload: Workload, contender: Contender, rank: int) -> Callable[[], None]:
    model, optimizer, after_backward = contender
    torch.manual_seed(rank)
    batches = itertools.cycle([workload.batch(rank) for _ in range(workload.num_batches)])

    def step() -> None:
        inputs, targets = next(batches)
        optimizer.zero_grad()
        workload.loss(model(inputs), targets).backward()
        after_backward()
        optimizer.step()

    return step


def slowest(seconds: float) -> float:
    value = torch.tensor(seconds, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return value.item()


def turn(step: Callable[[], None], num_steps: int) -> float:
    if dist.is_initialized():
        dist.barrier()
    began = time.perf_counter()
    for _ in range(num_steps):
        step()
    return slowest(time.perf_counter() - began) / num_steps * 1000


def measure(
    workload: Workload, wraps: dict[str, Wrap], rounds: int, rank: int
) -> dict[str, list[float]]:
    torch.manual_seed(0)
    model = workload.build()
    steps = {
        name: stepper(workload, wrap(copy.deepcopy(model)), rank) for name, wrap in wraps.items()
    }
    warm = max(turn(step, WARM_UP_STEPS) for step in steps.values())
    num_steps = max(2, round(SECONDS_PER_TURN * 1000 / warm))
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds):
        # The order rotates: the first one meets another state of the machine than the last.
        for name in sorted(steps, key=lambda name: (list(steps).index(name) + number) % len(steps)):
            times[name].append(turn(steps[name], num_steps))
    return times


def ratios(ours: list[float], theirs: list[float]) -> list[float]:
    return [a / b for a, b in zip(ours, theirs, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, help="write every round's figures to this file")
    args = parser.parse_args()
    world = lockstep.init()
    wraps = contenders()
    bare, ours, *others = wraps
    hand = [name for name in others if name.startswith("by hand")]
    others = [name for name in others if name not in hand]
    # The ratios to show, as contender and reference.
    pairs = [*((name, bare) for name in (ours, *hand)), *((name, ours) for name in others)]
    if len(others) > 1:
        pairs.append((others[0], others[1]))  # lockstep and torch over the same backend
    table = Table(
        "model", *wraps, *(f"{a} / {b}" for a, b in pairs),
        title=f"ms a step, {world.world_size} ranks, {torch.get_num_threads()} threads each: "
        f"median (quartiles) of {args.rounds} rounds",
    )  # fmt: skip
    results = {}
    for workload in WORKLOADS:
        times = measure(workload, wraps, args.rounds, world.rank)
        results[workload.name] = times
        table.add_row(
            workload.name,
            *(spread(values, 2) for values in times.values()),
            *(spread(ratios(times[a], times[b]), 3) for a, b in pairs),
        )
    if world.rank == 0:
        Console(width=200).print(table)
        if args.json:
            args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
