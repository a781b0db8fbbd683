"""Models, optimizers and numbers of shards, over all groups and numbers of ranks."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import lockstep
from tests.same_bits.runs import MODELS, OPTIMIZERS, Run, bits_on, differing, model_of

BACKENDS = ["threads", "shm", "gloo"]
NUM_STEPS = 50
# A run's numbers of ranks, one after the other.
STAGES = [(1, ""), (3, "shm"), (2, "gloo"), (4, "threads"), (1, "")]

pytestmark = [
    pytest.mark.long,
    pytest.mark.parametrize("num_shards", [4, 8, 12]),
    pytest.mark.parametrize("optimizer", OPTIMIZERS),
    pytest.mark.parametrize("kind", MODELS),
]


class Trained:
    """Runs of a model and an optimizer, whose steps have uneven shards and are clipped."""

    def __init__(self, kind: str, optimizer: str, num_shards: int) -> None:
        self.kind, self.optimizer, self.num_shards = kind, optimizer, num_shards

    def begin(self, group: dist.ProcessGroup | None) -> Run:
        """A run that hasn't taken a step."""
        return Run(model_of(self.kind), OPTIMIZERS[self.optimizer], group, self.num_shards)

    def take(self, run: Run, steps: range) -> Run:
        """Take some steps of it."""
        run.steps(steps, autocast=self.optimizer.endswith("autocast"))
        return run

    def alone(self) -> dict[str, Any]:
        """The bits of all steps in one process."""
        return self.take(self.begin(None), range(NUM_STEPS)).bits()


def test_ranks_end_with_the_bits_of_one_process(kind: str, optimizer: str, num_shards: int) -> None:
    trained = Trained(kind, optimizer, num_shards)
    alone = trained.alone()
    for num_ranks, backend in itertools.product([2, 3, 4], BACKENDS):
        every = bits_on(
            num_ranks, backend, lambda group: trained.take(trained.begin(group), range(NUM_STEPS))
        )
        for bits in every:
            assert not differing(bits, alone), (num_ranks, backend)


def test_a_run_goes_through_several_numbers_of_ranks(
    kind: str, optimizer: str, num_shards: int, tmp_path: Path
) -> None:
    trained = Trained(kind, optimizer, num_shards)
    alone = trained.alone()
    each = NUM_STEPS // len(STAGES)

    def stage(group: dist.ProcessGroup | None, number: int) -> Run:
        run = trained.begin(group)
        things = {"model": run.model, "optimizer": run.optimizer, "process_group": group}
        if number:
            run.numbers = lockstep.load(tmp_path, **things, numbers=[])["numbers"]
        trained.take(run, range(number * each, (number + 1) * each))
        lockstep.save(tmp_path, **things, numbers=run.numbers)
        return run

    for number, (num_ranks, backend) in enumerate(STAGES):
        ranks = bits_on(num_ranks, backend, lambda group, n=number: stage(group, n))  # type: ignore[misc]
    for bits in ranks:
        assert not differing(bits, alone)
