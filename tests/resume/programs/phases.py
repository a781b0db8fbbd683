"""A program that may be ended in each phase, those inside of steps() included, or poisoned.

POISON is a step at which the first attempt makes the weights wrong; a later step finds that.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.launcher import SnapshotMemory
from lockstep.resume import checkpoints, local_values, snapshots
from tests.resume.programs import ends

POISON = int(os.environ.get("POISON", "-1"))
NOTICED_AT = int(os.environ.get("NOTICED_AT", "8"))
number = -1  # of the step that runs


def end_in(owner: Any, name: str, phase: str) -> None:
    """Let the rank be ended when a function of the library is called."""
    function: Callable[..., Any] = getattr(owner, name)

    def ended(*args: Any, **options: Any) -> Any:
        ends.here(number, phase)
        return function(*args, **options)

    setattr(owner, name, ended)


class Samples(TensorDataset):
    def __getitem__(self, index: int) -> Any:
        ends.here(number, "data")
        return super().__getitem__(index)


def main(path: str | None) -> None:
    global number
    ends.here(-1, "start")
    lockstep.init()
    torch.manual_seed(3)
    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(1))
    model = lockstep.parallelize(nn.Sequential(nn.Linear(4, 64), nn.Dropout(), nn.Linear(64, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    snapshots._THREAD_BYTES = 0  # type: ignore[misc]
    end_in(snapshots.Snapshots, "_room", "room")
    end_in(snapshots, "_foreach_copy_", "copy")
    end_in(snapshots, "checksum_of", "checksum")
    end_in(SnapshotMemory, "complete", "header")
    end_in(snapshots.Snapshots, "restore", "restore")
    end_in(checkpoints, "save", "save")
    end_in(local_values, "put_local", "load")
    loader = lockstep.DataLoader(Samples(x), 6, shuffle=True)
    every = {"save_every": 3, "snapshot_every": 1, "keep": 3}
    steps = lockstep.steps(loader, path, epochs=2, **every, model=model, optimizer=optimizer)
    for (batch,) in steps:
        number = steps.step
        ends.here(number, "forward")
        loss = lockstep.mean((model(batch) - batch.sum(1, keepdim=True)).square().mean(1))
        loss.backward()
        ends.here(number, "backward")
        optimizer.step()
        optimizer.zero_grad()
        if number == POISON and not steps.restarts:
            model[0].weight.data[0] = torch.nan
        if number == NOTICED_AT and not all(p.isfinite().all() for p in model.parameters()):
            raise FloatingPointError("the weights aren't finite")
        ends.here(number, "update")
    ends.tell(*model.parameters())


if __name__ == "__main__":
    main(sys.argv[1] if sys.argv[1:] else None)
