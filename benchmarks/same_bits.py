"""What steps in shards cost beside accumulation of the same micro-batches, by turns.

    lockstep run -n 2 --threads 1 -m benchmarks.same_bits [--shards 4] [--rounds 15]
    lockstep run -n 1 --threads 1 -m benchmarks.same_bits --shards 8

On several ranks accumulation is that of lockstep.accumulate() and lockstep.mean(), with as many
micro-batches on each rank; on one it is plain, of losses that are divided by the number of them.
Milliseconds a step with SGD, of the slowest rank, as medians and quartiles: of wall time, and of
the time that a rank's process has computed, which other load disturbs less. A ratio is the median
of those of each round.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch.nn import functional as F

import lockstep
from benchmarks.models import BY_NAME, Workload, spread
from lockstep.same_bits import ShardedBatch, shards_of

NAMES = ("ConvNet", "MLP, 2 M", "200 small layers", "transformer, 9 M")
MicroBatches = Sequence[tuple[torch.Tensor, torch.Tensor]]


def losses_of(
    workload: Workload, model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor
) -> torch.Tensor:
    """A loss for each sample."""
    loss = F.nll_loss if workload.loss is F.nll_loss else F.cross_entropy
    return loss(model(x), y, reduction="none")


class Contender:
    """A model that takes steps of the same micro-batches in one of these ways."""

    def __init__(self, name: str, workload: Workload, batches: MicroBatches, shards: range) -> None:
        torch.manual_seed(0)
        self._workload, self._batches, self._shards = workload, batches, shards
        self._model = lockstep.parallelize(workload.build())
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-4, momentum=0.9)
        self._number = 0
        ways: dict[str, Callable[[], None]] = {
            "plain": self._plain,
            "accumulated": self._accumulated,
            "in shards": self._in_shards,
        }
        self._backwards = ways[name]

    def step(self) -> None:
        """Take a step."""
        self._backwards()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _losses(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return losses_of(self._workload, self._model, x, y)

    def _plain(self) -> None:
        for x, y in self._batches:
            (self._losses(x, y).mean() / len(self._batches)).backward()

    def _accumulated(self) -> None:
        *first, (x, y) = self._batches
        with lockstep.accumulate(self._model):
            for each in first:
                lockstep.mean(self._losses(*each)).backward()
        lockstep.mean(self._losses(x, y)).backward()

    def _in_shards(self) -> None:
        self._number += 1
        mine, world = self._shards, lockstep.init()
        num_shards = len(mine) * world.world_size
        batch = ShardedBatch(self._batches, mine, num_shards, seed=0, place=(0, self._number))
        for x, y in lockstep.shards(self._model, batch):
            lockstep.mean(self._losses(x, y)).backward()


def measure(workload: Workload, num_shards: int, num_rounds: int, num_steps: int) -> None:
    """Let the contenders take turns, and print what their steps take."""
    world = lockstep.init()
    shards = shards_of(world.rank, world.world_size, num_shards)
    batches = []
    for number in shards:
        torch.manual_seed(number)
        batches.append(workload.batch(number))
    names = ["plain" if world.world_size == 1 else "accumulated", "in shards"]
    contenders = {name: Contender(name, workload, batches, shards) for name in names}
    times: dict[str, list[list[float]]] = {name: [] for name in names}
    for number in range(num_rounds + 1):
        for name in names if number % 2 else reversed(names):
            lockstep.reduce(0.0)
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(num_steps):
                contenders[name].step()
            took = [time.perf_counter() - wall, time.process_time() - cpu]
            slowest = lockstep.reduce([1000 / num_steps * each for each in took], "max")
            if number:  # the first round warms up
                times[name].append(slowest)
    by_kind = [[[row[kind] for row in times[name]] for name in names] for kind in (0, 1)]
    ratios = [spread([new / old for old, new in zip(*both, strict=True)], 3) for both in by_kind]
    columns = "   ".join(
        f"{kind} {names[0]} {spread(both[0])}, {names[1]} {spread(both[1])}, x {ratio}"
        for kind, both, ratio in zip(("wall", "cpu"), by_kind, ratios, strict=True)
    )
    micro_batch = statistics.median(by_kind[0][0]) / len(shards)
    world.print(
        f"{workload.name:18} {world.world_size} ranks, {num_shards} shards, "
        f"{micro_batch:.1f} ms each: {columns}"
    )


def main() -> None:
    """Measure each model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--models", nargs="*", default=NAMES)
    arguments = parser.parse_args()
    for name in arguments.models:
        measure(BY_NAME[name], arguments.shards, arguments.rounds, arguments.steps)


if __name__ == "__main__":
    main()
