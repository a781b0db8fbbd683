"""Steps in which a rank fails: all ranks leave them out, and know who, where and why."""

from __future__ import annotations

import random

import pytest
import torch.distributed as dist

from tests.comm.ranks_on_hosts import run_hosts
from tests.counts import num_examples, pairs
from tests.guarding.faulty import KINDS, PHASES, Fault, Kind, Phase, Program, are_possible, run
from tests.ranks import run_ranks
from tests.same import assert_same

FAULTS = [(kind, phase) for kind in KINDS for phase in PHASES if are_possible(kind, phase)]


def check(
    faults: dict[int, Fault], size: int, backend: str, *, shards: bool, num_steps: int = 6
) -> None:
    """Fail unless all ranks tell of the faults, and end as those that leave these steps out."""

    def body(rank: int, group: dist.ProcessGroup) -> None:
        told, mine = run(Program(rank, group, shards=shards), faults, num_steps, leaves_out=False)
        _, expected = run(Program(rank, group, shards=shards), faults, num_steps, leaves_out=True)
        for number, step in enumerate(told):
            fault = faults.get(number)
            assert step.skipped is (fault is not None), (number, step.blame)
            if fault is None:
                assert step.blame is None
                continue
            is_finite = fault.kind in ("exception", "memory")
            assert step.blame.rank == fault.rank, step.blame
            assert step.blame.step == number
            assert step.blame.kind == (fault.kind if is_finite else "nonfinite"), step.blame
            if is_finite:
                assert "in fail" in step.blame.traceback
            else:
                assert step.blame.parameter in step.blame.nonfinite
        assert_same(mine, expected, 0)

    if backend == "hosts":
        run_hosts([range(size)[: size // 2], range(size)[size // 2 :]], body)
    else:
        run_ranks(size, body, backend=backend)


@pairs("fault, is_sharded, backend", FAULTS, [False, True], ["threads", "shm", "hosts", "gloo"])
def test_all_ranks_leave_out_the_step_in_which_one_fails(
    fault: tuple[Kind, Phase], is_sharded: bool, backend: str
) -> None:
    kind, phase = fault
    faults = {0: Fault(1, kind, phase), 3: Fault(0, kind, phase), 4: Fault(1, kind, phase)}
    check(faults, 2, backend, shards=is_sharded)


@pytest.mark.parametrize("is_sharded", [False, True], ids=["plain", "sharded"])
def test_three_ranks_leave_out_a_step(is_sharded: bool) -> None:
    faults = {1: Fault(2, "exception", "between"), 2: Fault(1, "nan", "forward")}
    check(faults, 3, "threads", shards=is_sharded, num_steps=4)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(num_examples(200, 5)))
def test_random_faults_of_random_ranks(seed: int) -> None:
    rng = random.Random(seed)
    size, num_steps = rng.choice([2, 3, 4]), 12
    faults = {
        step: Fault(rng.randrange(size), *rng.choice(FAULTS))
        for step in range(num_steps)
        if rng.random() < 0.5
    }
    backend = rng.choice(["threads", "shm", "hosts", "gloo"])
    check(faults, size, backend, shards=rng.random() < 0.5, num_steps=num_steps)
