"""What a guard costs: the same step with and without it, by turns, on the ranks of one host.

    lockstep run -n 2 -m benchmarks.guard [--rounds 15] [--backend gloo]

Milliseconds a step with AdamW, of the slowest rank, as medians and quartiles: of wall time, and of
the time that a rank's process has computed, which other load disturbs less. And what a look of
check_replicas() takes beside a hundred such steps.
"""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import nullcontext
from typing import Any

import torch

import lockstep
from benchmarks.models import BY_NAME, Workload, spread

NAMES = ("ConvNet", "transformer, 9 M")
CONTENDERS: dict[str, dict[str, Any] | None] = {
    "no guard": None,
    "guard": {},
    "guard, undo=False": {"undo": False},
}
NUM_STEPS = 5


class Contender:
    """A model that takes steps in a guard of some options, or in none."""

    def __init__(self, workload: Workload, options: dict[str, Any] | None, *, shards: bool) -> None:
        torch.manual_seed(0)
        self._workload, self._options = workload, options
        self._model = lockstep.parallelize(workload.build())
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4)
        if shards:
            lockstep.shard_optimizer(self._optimizer)

    def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """Take a step."""
        guard: Any = nullcontext()
        if self._options is not None:
            guard = lockstep.guard(self._model, self._optimizer, **self._options)
        with guard:
            self._workload.loss(self._model(x), y).backward()
            self._optimizer.step()
        self._optimizer.zero_grad()

    def look(self) -> None:
        """Compare the replicas."""
        lockstep.check_replicas(self._model, self._optimizer)


def measure(workload: Workload, num_rounds: int, *, shards: bool) -> None:
    """Let the contenders take turns, and print what their steps take."""
    world = lockstep.init()
    torch.manual_seed(world.rank)
    x, y = workload.batch(world.rank)
    contenders = {
        name: Contender(workload, options, shards=shards) for name, options in CONTENDERS.items()
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in CONTENDERS}
    for number in range(num_rounds + 1):
        for name, contender in contenders.items():
            lockstep.reduce(0.0)
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(NUM_STEPS):
                contender.step(x, y)
            took = [time.perf_counter() - wall, time.process_time() - cpu]
            slowest = lockstep.reduce([1000 / NUM_STEPS * each for each in took], "max")
            if number:  # the first round warms up
                times[name].append(tuple(slowest))
    base = [statistics.median(each) for each in zip(*times["no guard"], strict=True)]
    for name, each in times.items():
        of_wall, of_cpu = (list(column) for column in zip(*each, strict=True))
        ratios = [statistics.median(of_wall) / base[0], statistics.median(of_cpu) / base[1]]
        world.print(
            f"{workload.name:18} {'sharded' if shards else 'plain':8} {name:18} "
            f"wall {spread(of_wall)}  x {ratios[0]:.3f}   cpu {spread(of_cpu)}  x {ratios[1]:.3f}"
        )
    looks = []
    for _ in range(num_rounds):
        wall = time.perf_counter()
        contenders["no guard"].look()
        looks.append(1000 * lockstep.reduce(time.perf_counter() - wall, "max"))
    share = statistics.median(looks) / (100 * base[0])
    world.print(f"{workload.name:18} {'':8} check_replicas()   wall {spread(looks)}  {share:.2%}")


def main() -> None:
    """Measure each model, with a plain and with a sharded optimizer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--backend", help="by default shm")
    options = parser.parse_args()
    lockstep.init(backend=options.backend)
    for name in NAMES:
        for shards in (False, True):
            measure(BY_NAME[name], options.rounds, shards=shards)


if __name__ == "__main__":
    main()
