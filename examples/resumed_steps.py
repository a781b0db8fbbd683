"""A training whose ranks may be killed at any moment, and that ends with the same bits.

    python examples/resumed_steps.py
    lockstep run -n 2 --restarts 3 examples/resumed_steps.py
    lockstep run -n 2 --restarts 3 examples/resumed_steps.py --kill-at 40 90

With --kill-at, the last rank kills itself at these steps. The digest of the parameters that is
printed last is the same on all lines of a number of ranks.
"""

import argparse
import hashlib
import os
import signal

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep

NUM_EPOCHS = 8
BATCH_SIZE = 32


def digits() -> TensorDataset:
    """Rows of numbers, and the number of the largest of four sums of theirs."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(500, 16, generator=generator)
    return TensorDataset(x, x.view(500, 4, 4).sum(2).argmax(1))


def main(kill_at: list[int]) -> None:
    """Train, and print what the parameters are."""
    world = lockstep.init()
    lockstep.seed(0)
    net = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.Dropout(0.2), nn.Linear(64, 4))
    model = lockstep.parallelize(net.to(world.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, NUM_EPOCHS)
    loader = lockstep.DataLoader(digits(), BATCH_SIZE, shuffle=True)

    total = torch.zeros((), device=world.device)  # of the epoch: what lasts is among the things
    things = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "total": total}

    steps = lockstep.steps(loader, epochs=NUM_EPOCHS, **things)
    for x, y in steps:
        if kill_at[steps.restarts :][:1] == [steps.step] and world.rank == world.world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        losses = F.cross_entropy(model(x.to(world.device)), y.to(world.device), reduction="none")
        loss = lockstep.mean(losses)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total += loss.detach()
        if steps.is_last_of_epoch:
            scheduler.step()
            world.print(f"epoch {steps.epoch}: mean loss {float(total) / len(loader):.3f}")
            total.zero_()

    parameters = torch.cat([p.detach().flatten().cpu() for p in model.parameters()])
    digest = hashlib.sha256(parameters.numpy().tobytes()).hexdigest()[:16]
    world.print(f"{steps.restarts} restarts; parameters {digest}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--kill-at", type=int, nargs="*", default=[], metavar="STEP")
    main(parser.parse_args().kill_at)
