"""Milliseconds a step, in a plain loop and in one over lockstep.steps() with snapshots.

    lockstep run -n 2 --restarts 1 -m benchmarks.snapshots [--rounds 15] [--every N]

Both loops train replicas of one model, and take turns of some steps each, round after round. A turn
of ``steps()`` lasts until its last snapshot is complete. The time of a round is that of the slowest
rank; beside it stands the processor time of all ranks, which other load affects less. Last come the
bytes of a snapshot and how long it takes to verify it and put it back: all that a restart does
before its first step, but for the program's own beginning.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn

import lockstep
from benchmarks.models import BY_NAME, Workload, spread
from benchmarks.steps import momentum, slowest
from lockstep.resume import Steps

MODELS = ("ConvNet", "transformer, 9 M", "MLP, 2 M", "200 small layers")
SECONDS_PER_TURN = 0.5
WARM_UP_STEPS = 20
NUM_RESTORES = 5


class Turn(NamedTuple):
    """What a step takes, in milliseconds."""

    wall: float  # of the slowest rank
    processor: float  # the mean of the ranks


class Trained:
    """A replica that trains in one of the loops."""

    def __init__(
        self, workload: Workload, model: nn.Module, rank: int, numbers: Callable[..., Iterator[int]]
    ) -> None:
        self.workload, self.model = workload, lockstep.parallelize(model)
        self.optimizer = momentum(model)
        torch.manual_seed(rank)
        self.inputs, self.targets = workload.batch(rank)
        self.numbers = numbers(model=self.model, optimizer=self.optimizer)

    def step(self) -> None:
        next(self.numbers)
        loss = self.workload.loss(self.model(self.inputs), self.targets)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def turn(trained: Trained, num_steps: int, complete: Callable[[], None]) -> Turn:
    dist.barrier()
    began, used = time.perf_counter(), time.process_time()
    for _ in range(num_steps):
        trained.step()
    complete()
    seconds, used = time.perf_counter() - began, time.process_time() - used
    processor = lockstep.reduce(used, "sum") / dist.get_world_size()
    return Turn(slowest(seconds) / num_steps * 1000, processor / num_steps * 1000)


def measure(workload: Workload, rounds: int, every: int | None, rank: int) -> list[str]:
    torch.manual_seed(0)
    model = workload.build()
    made: list[Steps[int]] = []

    def numbers(**things: Any) -> Iterator[int]:
        made.append(lockstep.steps(10**9, snapshot_every=every, **things))
        return iter(made[0])

    plain = Trained(workload, copy.deepcopy(model), rank, lambda **_: iter(range(10**9)))
    kept = Trained(workload, model, rank, numbers)
    snapshots = made[0]._memory._snapshots
    if snapshots is None:
        raise SystemExit("Start it by 'lockstep run --restarts 1': the launcher holds snapshots.")
    loops = {"plain": (plain, lambda: None), "steps": (kept, snapshots.join)}
    warm = max(turn(each, WARM_UP_STEPS, complete).wall for each, complete in loops.values())
    num_steps = max(5, round(SECONDS_PER_TURN * 1000 / warm))
    times: dict[str, list[Turn]] = {name: [] for name in loops}
    first = made[0].step
    taken: list[float] = []
    take = snapshots.take

    def counted(*args: Any) -> float:
        taken.append(made[0].step)
        return take(*args)

    snapshots.take = counted  # type: ignore[method-assign]
    for number in range(rounds):
        for name in list(loops)[:: 1 if number % 2 else -1]:
            times[name].append(turn(loops[name][0], num_steps, loops[name][1]))
    num_done = made[0].step - first
    seconds = []
    step = max(snapshots.usable())
    for _ in range(NUM_RESTORES):
        began = time.perf_counter()
        snapshots.usable()
        snapshots.restore(step)
        seconds.append(slowest(time.perf_counter() - began))
    header = max(snapshots._memory.headers().values(), key=lambda header: header.step)
    kept.numbers.close()  # type: ignore[attr-defined]
    pairs = [*zip(times["steps"], times["plain"], strict=True)]
    return [
        workload.name,
        spread([each.wall for each in times["plain"]]),
        spread([each.wall for each in times["steps"]]),
        spread([a.wall / b.wall for a, b in pairs], 3),
        spread([a.processor / b.processor for a, b in pairs], 3),
        f"{num_done / max(1, len(taken)):.0f}",
        f"{header.num_bytes / 1e6:.2f}",
        f"{statistics.median(seconds) * 1000:.1f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--every", type=int, help="steps between snapshots; by default chosen")
    parser.add_argument("--models", nargs="*", default=MODELS, choices=[*BY_NAME])
    args = parser.parse_args()
    world = lockstep.init()
    table = Table(
        *("model", "plain loop, ms", "steps(), ms", "ratio", "ratio of processor time"),
        *("steps a snapshot", "MB", "restored in ms"),
        title=f"{world.world_size} ranks, {torch.get_num_threads()} threads each: "
        f"median (quartiles) of {args.rounds} rounds",
    )
    for name in args.models:
        table.add_row(*measure(BY_NAME[name], args.rounds, args.every, world.rank))
    if world.rank == 0:
        Console(width=160).print(table)


if __name__ == "__main__":
    main()
