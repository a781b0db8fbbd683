"""Guarded steps over NCCL, where no host waits for a device, and no call is told of another one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import lockstep
from tests.guarding.faulty import KINDS, PHASES, Fault, Program, are_possible, run
from tests.simulated import control

pytestmark = pytest.mark.forks

FAULTS = [(kind, phase) for kind in KINDS for phase in PHASES if are_possible(kind, phase)]
HOW: list[dict[str, Any]] = [{}, {"shards": True}, {"shards": True, "overlap": True}]


def left_out(world: lockstep.World, faults: dict[int, Fault], **how: Any) -> list[str]:
    """Take steps of which some fail; return what is wrong with what came of that."""
    ranks = world.rank, dist.group.WORLD
    program, other = (Program(*ranks, device=world.device, **how) for _ in range(2))
    num_steps = max(faults) + 2
    told, mine = run(program, faults, num_steps, leaves_out=False)
    _, expected = run(other, faults, num_steps, leaves_out=True)
    torch.accelerator.synchronize()
    wrong = [] if all(map(torch.equal, mine, expected)) else [f"parameters after {faults}"]
    for number, step in enumerate(told):
        fault = faults.get(number)
        if (step.blame and step.blame.rank) != (fault and fault.rank):
            wrong.append(f"{fault} is told as {step.blame}")
    return wrong


def all_left_out(world: lockstep.World) -> list[str]:
    control.set_delay("0,0")
    found, places = [], [1, 3, 4, 6, 8, 9]
    for first, how in enumerate(HOW):
        faults = {
            step: Fault((step + first) % world.world_size, *fault)
            for step, fault in zip(places, FAULTS[first :: len(HOW)], strict=False)
        }
        found += [f"{how}: {each}" for each in left_out(world, faults, **how)]
    return found


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_all_ranks_leave_out_the_steps_in_which_one_fails(num_ranks: int) -> None:
    assert lockstep.launch(all_left_out, num_ranks) == [[]] * num_ranks
