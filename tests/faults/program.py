"""A small program to which faults happen: python -m tests.faults.program FOLDER OPTIONS."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import random
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

import lockstep
from lockstep import steps as steps_of
from lockstep.launcher import SnapshotMemory
from tests.faults.injection import Injection
from tests.faults.plan import NUM_STEPS, SAVE_EVERY, STEPS_PER_EPOCH, TIMEOUT_SECONDS, Run

NUM_FEATURES, BATCH = 12, 12


class Samples(Dataset[Any]):
    """Samples made of their index alone."""

    def __init__(self, injection: Injection) -> None:
        self._injection = injection

    def __len__(self) -> int:
        return BATCH * STEPS_PER_EPOCH - 3  # the last batch is short: of two samples a rank or more

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self._injection.at("data")
        x = torch.randn(NUM_FEATURES, generator=torch.Generator().manual_seed(index))
        y = x[0].gt(0).long() + x[1].gt(0).long()
        poison, self._injection.poison = self._injection.poison, 1.0
        return x * poison, y


class Probe(nn.Module):
    """A layer in whose forward and backward faults happen."""

    def __init__(self, injection: Injection) -> None:
        super().__init__()
        self._injection = injection

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self._injection.at("forward")
            x.register_hook(lambda _: self._injection.at("backward"))
        return x * self._injection.poison


class Ledger:
    """A thing with a state of its own, which is asked for it by snapshots and checkpoints."""

    def __init__(self, injection: Injection) -> None:
        self._injection, self.sums = injection, [0.0]

    def state_dict(self) -> dict[str, Any]:
        self._injection.at("save" if _is_saving() else "snapshot", of_code=True)
        return {"sums": [*self.sums]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sums = [*state["sums"]]


def _is_saving() -> bool:
    frame: Any = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename.endswith("checkpoint/saving.py"):
            return True
        frame = frame.f_back
    return False


def watch_writes(injection: Injection) -> None:
    """Let faults happen before a snapshot is complete, and before a file of a checkpoint is."""
    complete, fsync = SnapshotMemory.complete, os.fsync

    def complete_later(*args: Any) -> None:
        injection.at("snapshot", of_code=False)
        complete(*args)

    def fsync_later(descriptor: Any) -> None:
        injection.at("save", of_code=False)
        fsync(descriptor)

    SnapshotMemory.complete = complete_later  # type: ignore[method-assign]
    os.fsync = fsync_later


def join(run: Run) -> lockstep.World:
    """Join the other ranks over the run's network."""
    if run.network == "two levels":
        # Ranks of this host think that they are on two.
        hosts: Any = importlib.import_module("lockstep.comm.hosts")
        name = f"half {2 * int(os.environ['RANK']) // run.size}"
        hosts.this_memory = lambda: name
    backend = "gloo" if run.network == "gloo" else "shm"
    return lockstep.init(backend=backend, timeout=timedelta(seconds=TIMEOUT_SECONDS))


def things_of(run: Run, injection: Injection) -> dict[str, Any]:
    torch.manual_seed(5)
    layers = nn.Linear(NUM_FEATURES, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), Probe(injection)
    model = nn.Sequential(*layers, nn.Linear(16, 3))
    lockstep.parallelize(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    if run.is_sharded:
        lockstep.shard_optimizer(optimizer)
    optimizer.register_step_post_hook(lambda *_: injection.at("update"))
    return {"model": model, "optimizer": optimizer, "ledger": Ledger(injection)}


def check(what: torch.Tensor, step: int) -> torch.Tensor:
    """What many programs do: refuse numbers that make no sense.

    Raises:
        FloatingPointError: If one isn't finite.
    """
    if not what.isfinite().all():
        raise FloatingPointError(f"a loss isn't finite in step {step}")
    return what


def evaluate(things: dict[str, Any], injection: Injection) -> float:
    model = things["model"]
    model.eval()
    injection.at("evaluation")
    with torch.no_grad():
        x = torch.randn(6, NUM_FEATURES, generator=torch.Generator().manual_seed(1000))
        losses = check(model(x).square().mean(1), injection.step)
    model.train()
    return float(lockstep.reduce(float(losses.mean()), "mean"))


def digests(things: dict[str, Any]) -> dict[str, str]:
    """Digests of all that a step changes."""
    found = dict(things["model"].state_dict())
    state = things["optimizer"].state_dict()["state"]
    found |= {f"{i}.{k}": v for i in state for k, v in state[i].items()}
    texts = {
        name: hashlib.sha256(value.contiguous().numpy().tobytes()).hexdigest()[:16]
        for name, value in found.items()
        if isinstance(value, torch.Tensor)
    }
    return texts | {"ledger": repr(things["ledger"].sums)}


def note_step(folder: Path, step: int, rank: int) -> None:
    """Note when a step ended."""
    words = f"{os.environ['LOCKSTEP_RESTARTS']} {rank} {step} {time.monotonic()}\n"
    descriptor = os.open(folder / "steps", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(descriptor, words.encode())
    os.close(descriptor)


def main(folder: Path, run: Run, epochs: int, step_seconds: float) -> None:
    injection = Injection(folder)
    injection.at("start")
    watch_writes(injection)
    world = join(run)
    things = things_of(run, injection)
    loader: Any = lockstep.DataLoader(
        Samples(injection),
        BATCH,
        shuffle=True,
        num_workers=run.num_workers,
        seed=2,
    )
    path = folder / "run" if run.has_path else None
    options = {"snapshot_every": 1, "save_every": SAVE_EVERY, "epochs": epochs}
    steps = steps_of(loader, path, **options, **things)
    first = injection.step = steps.step
    for x, y in steps:
        x = x + torch.randn_like(x) * (random.random() + np.random.rand())
        losses = nn.functional.cross_entropy(things["model"](x), y, reduction="none")
        lockstep.mean(check(losses, steps.step)).backward()
        things["optimizer"].step()
        things["optimizer"].zero_grad()
        things["ledger"].sums[0] += 0.1
        if steps.is_last_of_epoch:
            metric = evaluate(things, injection)
            things["ledger"].sums.append(metric)
            if run.has_path:
                steps.best(metric)
        note_step(folder, steps.step, world.rank)
        time.sleep(step_seconds)
        injection.step = steps.step + 1
    injection.make_room()
    result = {"first": first, "restarts": steps.restarts, "bits": digests(things)}
    (folder / f"rank-{world.rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    given = json.loads(sys.argv[2])
    epochs = given.get("epochs", NUM_STEPS // STEPS_PER_EPOCH)
    main(Path(sys.argv[1]), Run(*given["run"]), epochs, given.get("step_seconds", 0.0))
