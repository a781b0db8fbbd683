"""Steps in which a rank fails: all ranks leave them out, and know who, where and why."""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import partial

import pytest
import torch.distributed as dist

import lockstep
from lockstep.errors import ReplicasDiffer
from tests.comm.ranks_on_hosts import run_hosts
from tests.counts import num_examples, pairs
from tests.guarding.faulty import (
    KINDS,
    PHASES,
    Fault,
    Flip,
    Kind,
    Net,
    Phase,
    Program,
    are_possible,
    run,
)
from tests.ranks import run_ranks
from tests.same import assert_same

FAULTS = [(kind, phase) for kind in KINDS for phase in PHASES if are_possible(kind, phase)]


def look_for(flips: Mapping[int, Flip], size: int, program: Program, step: int) -> None:
    """Let a bit flip behind the step, or none, and fail unless check_replicas() tells of it."""
    replicas, flip = (program.model, program.optimizer), flips.get(step)
    if flip is None:
        assert lockstep.check_replicas(*replicas) == []
        return
    if flip.rank == program.rank:
        flip.apply(program.model)
    with pytest.raises(ReplicasDiffer) as caught:
        lockstep.check_replicas(*replicas)
    (difference,) = caught.value.differences
    assert difference.name == f"parameter {flip.name}"
    assert difference.ranks == ((flip.rank,) if size > 2 else (0, 1))
    if size > 2:
        assert lockstep.check_replicas(*replicas, repair=True) == [difference]
    elif flip.rank == program.rank:
        flip.apply(program.model)


def check(
    faults: dict[int, Fault],
    size: int,
    backend: str,
    *,
    shards: bool,
    num_steps: int = 6,
    flips: Mapping[int, Flip] | None = None,
) -> None:
    """Fail unless all ranks tell of the faults, and end as those that leave these steps out."""

    def body(rank: int, group: dist.ProcessGroup) -> None:
        look = {} if flips is None else {"look": partial(look_for, flips, size)}
        program = Program(rank, group, shards=shards)
        told, mine = run(program, faults, num_steps, leaves_out=False, **look)
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
    """And bits that flip behind random steps, of which check_replicas() tells."""
    rng = random.Random(seed)
    size, num_steps = rng.choice([2, 3, 4]), 12
    faults = {
        step: Fault(rng.randrange(size), *rng.choice(FAULTS))
        for step in range(num_steps)
        if rng.random() < 0.5
    }
    backend = rng.choice(["threads", "shm", "hosts", "gloo"])
    shards, flips = rng.random() < 0.5, dict[int, Flip]()
    for step in rng.sample(range(num_steps), 3):
        name, parameter = rng.choice([*Net(0).named_parameters()])
        element, bit = rng.randrange(parameter.numel()), rng.randrange(32)
        flips[step] = Flip(rng.randrange(size), name, element, bit)
    check(faults, size, backend, shards=shards, num_steps=num_steps, flips=flips)


@pytest.mark.parametrize("is_sharded", [False, True], ids=["plain", "sharded"])
@pytest.mark.parametrize("size", [2, 3])
def test_a_bit_that_flips_between_guarded_steps_is_found(size: int, is_sharded: bool) -> None:
    flips = {1: Flip(1, "first.weight", 7, 31), 2: Flip(0, "second.bias", 0, 0)}
    faults = {2: Fault(0, "exception", "update")}
    check(faults, size, "threads", shards=is_sharded, num_steps=4, flips=flips)
