"""A trainer with a loop over epochs, one over batches, accumulation over steps, and callbacks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep
from tests.resume.programs import ends

EPOCHS, ACCUMULATION, UNFREEZE_AT = 4, 3, 9


class EarlyStopping:
    """Tells when the loss hasn't fallen for long."""

    def __init__(self, patience: int) -> None:
        self.patience, self.best, self.bad = patience, float("inf"), 0

    def __call__(self, loss: float) -> bool:
        self.bad = 0 if loss < self.best else self.bad + 1
        self.best = min(self.best, loss)
        return self.bad > self.patience

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "bad": self.bad}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.bad = state["best"], state["bad"]


def main() -> None:
    lockstep.init()
    lockstep.seed(3)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(90, 8, generator=generator)
    data = TensorDataset(x, (x.sum(1) > 0).long())
    body = nn.Sequential(nn.Linear(8, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Dropout(0.3))
    model = nn.Sequential(body, nn.Linear(24, 2))
    body.requires_grad_(False)
    lockstep.parallelize(model)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.005, momentum=0.5)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=40)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    stopping = EarlyStopping(1)
    loader = lockstep.DataLoader(data, 10, shuffle=True)
    total = torch.zeros((), dtype=torch.float64)
    things = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "total": total}
    things |= {"stopping": stopping, "plateau": plateau}
    steps = lockstep.steps(loader, epochs=EPOCHS, snapshot_every=1, **things)
    for epoch in range(steps.epoch, EPOCHS):
        for inputs, labels in steps:
            assert steps.epoch == epoch
            ends.here(steps.step, "forward")
            if steps.step == UNFREEZE_AT:
                body.requires_grad_(True)
            losses = F.cross_entropy(model(inputs), labels, reduction="none")
            (lockstep.mean(losses) / ACCUMULATION).backward()
            ends.here(steps.step, "backward")
            total += float(losses.detach().sum())
            if steps.step % ACCUMULATION == ACCUMULATION - 1:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad(set_to_none=False)
            ends.here(steps.step, "update")
            if steps.is_last_of_epoch:
                loss = lockstep.reduce(float(total), "sum") / len(data)
                plateau.step(loss)
                total.zero_()
                stopped = stopping(loss)
                break
        if stopped:
            break
    ends.tell(*model.state_dict().values(), total)
    print(f"stopped at {steps.step}")


if __name__ == "__main__":
    main()
