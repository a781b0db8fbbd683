"""Ranks of which one is late: ``lockstep run -n 2 tests/world/late.py BACKEND``."""

from __future__ import annotations

import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

import lockstep

SHORT, LONG = timedelta(seconds=0.5), timedelta(seconds=60)


def late_in(world: lockstep.World, first: timedelta | None) -> str:
    """Rank 1 is 1.5 s late in each of two steps; return in which of them that was too late."""
    lockstep.init(timeout=SHORT, first_step_timeout=first)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    told = ""
    for step in range(2):
        if world.rank:
            time.sleep(1.5)
        try:
            dist.all_reduce(torch.ones(1))
        except RuntimeError:
            told += str(step)
        optimizer.step()
    if not world.rank:
        time.sleep(2)  # so that the other one finds it still there
    return told


if __name__ == "__main__":
    world = lockstep.init(backend=sys.argv[1])
    if not world.rank:
        print("late in", late_in(world, LONG))
    else:
        late_in(world, LONG)
