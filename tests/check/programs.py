"""What programs have in common that a check is tried on.

A program is ``BEGIN`` and a body. Global batches are of 21 samples, which two ranks divide
unevenly, unless ranks have to have equally many.
"""

from __future__ import annotations

from typing import NamedTuple

BEGIN = """\
import copy, math, os, random
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, DistributedSampler, IterableDataset, Subset, TensorDataset
import lockstep

world = lockstep.init()
generator = torch.Generator().manual_seed(1)
X = torch.randn(90, 6, generator=generator)
Y = torch.randint(0, 3, (90,), generator=generator)
data = TensorDataset(X, Y)
torch.manual_seed(0)

def net(*middle):
    return nn.Sequential(nn.Linear(6, 8), *(middle or (nn.Tanh(),)), nn.Linear(8, 3))

def losses_of(y, target):
    return F.cross_entropy(y, target, reduction="none")

def loader_of(dataset=data, size=21, **options):
    return lockstep.DataLoader(dataset, batch_size=size, shuffle=True, **options)

class Lists(Dataset):
    def __init__(self, seed=3):
        g = torch.Generator().manual_seed(seed)
        lengths = torch.randint(1, 7, (90,), generator=g).tolist()
        self.rows = [torch.randint(1, 20, (n,), generator=g) for n in lengths]
    def __len__(self):
        return 90
    def __getitem__(self, index):
        return self.rows[index], Y[index]

def pad(samples):
    rows, labels = zip(*samples)
    return nn.utils.rnn.pad_sequence(rows, batch_first=True), torch.stack(labels)

def step(optimizer, loss):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""

# The usual loop, of which most programs change some lines.
USUAL = """\
model = lockstep.parallelize(net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for epoch in range(3):
    for x, y in loader_of():
        optimizer.zero_grad()
        loss = lockstep.mean(losses_of(model(x), y))
        loss.backward()
        optimizer.step()
"""
# An optimizer with other weights for evaluations, as Schedule-Free has them.
FREE = """\
class Free(torch.optim.Optimizer):
    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr, "train_mode": True, "k": 0})
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                mean = self.state[p].setdefault("mean", p.clone())
                p.sub_(p.grad, alpha=group["lr"])
                mean.lerp_(p, 1 / (group["k"] + 1))
    @torch.no_grad()
    def _swap(self, mode):
        for group in self.param_groups:
            if group["train_mode"] != mode:
                for p in group["params"]:
                    kept = p.clone()
                    p.copy_(self.state[p]["mean"])
                    self.state[p]["mean"] = kept
            group["train_mode"] = mode
    def eval(self):
        self._swap(False)
    def train(self):
        self._swap(True)
"""
BACKWARD = "        loss.backward()\n"
STEP = "        optimizer.step()\n"
LOSS = "        loss = lockstep.mean(losses_of(model(x), y))\n"
MODEL = "model = lockstep.parallelize(net())\n"
OPTIONS = "SGD(model.parameters(), lr=0.1, momentum=0.9)"
SGD = f"optimizer = torch.optim.{OPTIONS}\n"
LOADER = "loader_of()"
EVEN = (LOADER, "loader_of(size=20)")


def usual(*changes: tuple[str, str]) -> str:
    """The usual loop with other lines."""
    text = USUAL
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    return text


class Planted(NamedTuple):
    """A program with a mistake, and what a check says of it.

    Where the words are None no cause is to be named: what is known of the difference is told, or
    nothing shows. ``code`` is what the check exits with.
    """

    body: str
    words: str | None  # of the cause
    code: int = 1
