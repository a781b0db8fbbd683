"""A training program with all that may depend on where it was ended; FAULT says how that happens.

FAULT is "kind:step:rank:phase", and isn't among the arguments: snapshots belong to these.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.resume import snapshots

NUM_SAMPLES, BATCH, EPOCHS = 57, 12, 2  # the last batch is short
NUM_STEPS = 10
_PR_SET_PDEATHSIG = 1
_DEFAULTS: dict[str, Any] = {
    "backend": "shm",
    "kind": "plain",
    "path": False,
    "workers": 0,
    "width": 16,
    "steps": {},
    "numbers": 0,
    "unsteady": False,
    "thread_bytes": snapshots._THREAD_BYTES,
}


def fail(step: int, rank: int, phase: str) -> None:
    kind, *where = os.environ.get("FAULT", "").split(":")
    if where != [str(step), str(rank), phase]:
        return
    if kind == "raise":
        raise RuntimeError(f"planned at step {step}")
    os.kill(os.getpid(), getattr(signal, kind))


def end_with_rank(worker: int) -> None:
    """Let the kernel end a worker of a loader when its rank is killed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Counter:
    """Has another state on each rank."""

    def __init__(self) -> None:
        self.sums: list[Any] = [0, torch.zeros(2)]

    def state_dict(self) -> dict[str, Any]:
        return {"sums": self.sums}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sums = state["sums"]


def things_of(options: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(5)
    width = options["width"]
    model: nn.Module = nn.Sequential(
        nn.Linear(10, width), nn.BatchNorm1d(width), nn.Dropout(0.3), nn.Linear(width, 3)
    )
    lockstep.parallelize(model)
    if options["kind"].endswith("adam"):
        optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if options["kind"].startswith("sharded"):
        lockstep.shard_optimizer(optimizer)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7),
        "scaler": torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=4),
        "generator": torch.Generator().manual_seed(3),
        "noise": torch.zeros(3),
        "counter": Counter(),
    }


def loss_of(things: dict[str, Any], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    draw = random.random() + np.random.rand()
    draw += float(torch.rand((), generator=things["generator"]))
    things["noise"] += draw
    things["counter"].sums[0] += len(y)
    things["counter"].sums[1] += draw
    x = x + 0.1 * torch.randn_like(x) * draw
    losses = nn.functional.cross_entropy(things["model"](x), y, reduction="none")
    return lockstep.mean(losses)


def digests(things: dict[str, Any]) -> dict[str, str]:
    found = {f"model.{k}": v for k, v in things["model"].state_dict().items()}
    state = things["optimizer"].state_dict()["state"]
    found |= {f"optimizer.{i}.{k}": v for i in state for k, v in state[i].items()}
    found |= {"noise": things["noise"], "generator": things["generator"].get_state()}
    texts = {
        name: hashlib.sha256(value.contiguous().numpy().tobytes()).hexdigest()[:16]
        for name, value in found.items()
        if isinstance(value, torch.Tensor)
    }
    return texts | {k: str(things[k].state_dict()) for k in ("scheduler", "scaler", "counter")}


def main(folder: Path, options: dict[str, Any]) -> None:
    options = _DEFAULTS | options
    snapshots._THREAD_BYTES = options["thread_bytes"]
    world = lockstep.init(backend=options["backend"])
    x = torch.randn(NUM_SAMPLES, 10, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, x[:, 0].gt(0).long() + x[:, 1].gt(0).long())
    things = things_of(options)
    loader: Any = lockstep.DataLoader(
        data,
        BATCH,
        shuffle=True,
        num_workers=options["workers"],
        seed=2,
        worker_init_fn=end_with_rank if options["workers"] else None,
    )
    where = {} if options["numbers"] else {"epochs": EPOCHS}
    steps = lockstep.steps(
        options["numbers"] or loader,
        folder / "run" if options["path"] else None,
        **where,
        **options["steps"],
        **things,
    )
    seen = []
    for batch in steps:
        seen.append([steps.step, steps.epoch, steps.is_last_of_epoch])
        fail(steps.step, world.rank, "forward")
        if options["numbers"]:
            rows = slice(batch * 2, batch * 2 + 5)
            batch = x[rows], data.tensors[1][rows]
        loss = loss_of(things, *batch)
        if options["unsteady"]:
            loss = loss * (1 + steps.restarts)
        scaled = things["scaler"].scale(loss)
        scaled.backward()
        fail(steps.step, world.rank, "update")
        things["scaler"].step(things["optimizer"])
        things["scaler"].update()
        things["optimizer"].zero_grad()
        things["scheduler"].step()
        fail(steps.step, world.rank, "end")
    result = {"seen": seen, "restarts": steps.restarts, "bits": digests(things)}
    (folder / f"rank-{world.rank}.json").write_text(json.dumps(result))
