"""Programs with a mistake in each, and what tells its cause.

``BODY`` is a training script; a mistake replaces some of its lines.
"""

from __future__ import annotations

BODY = """\
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset
import lockstep

world = lockstep.init()
generator = torch.Generator().manual_seed(1)
dataset = TensorDataset(
    torch.randn(90, 6, generator=generator), torch.randint(0, 3, (90,), generator=generator)
)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 3))
model = lockstep.parallelize(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = lockstep.DataLoader(dataset, batch_size=21, shuffle=True)

for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        losses = F.cross_entropy(model(x), y, reduction="none")
        loss = lockstep.mean(losses)
        loss.backward()
        optimizer.step()
"""

_MEAN = "        loss = lockstep.mean(losses)\n"
_PARALLEL = "model = lockstep.parallelize(model)\n"
_LOADER = "loader = lockstep.DataLoader(dataset, batch_size=21, shuffle=True)\n"
_STEP = "        optimizer.step()\n"
_SGD = "torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)"

# What is replaced, by what, and words of the cause that is to be named.
MISTAKES: dict[str, tuple[str, str, str]] = {
    "a mean of means": (_MEAN, "        loss = losses.mean()\n", "mean of means"),
    "the sum for the mean": (
        _MEAN,
        _MEAN + "        loss = loss * world.world_size\n",
        "2 times those of one process: they are summed",
    ),
    "divided twice": (
        _MEAN,
        _MEAN + "        loss = loss / world.world_size\n",
        "they are averaged twice",
    ),
    "BatchNorm": ("nn.Tanh()", "nn.BatchNorm1d(8)", "BatchNorm"),
    "a sampler that pads": (
        _LOADER,
        "dataset.tensors = tuple(each[:31] for each in dataset.tensors)\n"
        "sampler = torch.utils.data.DistributedSampler(dataset, world.world_size, world.rank)\n"
        "loader = torch.utils.data.DataLoader(dataset, 21 // world.world_size, sampler=sampler)\n",
        "the sampler isn't lockstep's",
    ),
    "no sampler": (
        _LOADER,
        "loader = torch.utils.data.DataLoader(dataset, 21)\n",
        "doesn't divide the samples",
    ),
    "noise by rank": (
        "model(x)",
        "model(x + 0.1 * torch.randn(x.shape))",
        "random numbers are drawn",
    ),
    "no parallel model": (_PARALLEL, "", "the model isn't parallel"),
    "no_sync": (
        "        loss.backward()\n",
        "        with lockstep.no_sync(model):\n            loss.backward()\n",
        "no_sync()",
    ),
    "a part outside of the model": (
        _PARALLEL,
        "lockstep.parallelize(model[0])\n",
        "outside of the parallel model",
    ),
    "a learning rate for the ranks": ("lr=0.1", "lr=0.1 * world.world_size", "lr is 0.2 and 0.1"),
    "a learning rate by rank": ("lr=0.1", "lr=0.1 * (1 + world.rank)", "lr is 0.1 and 0.2"),
    "a rank that leaves steps out": (
        _STEP,
        "        if world.rank == 0:\n            optimizer.step()\n",
        "a rank leaves out steps",
    ),
    "parameters changed by one rank": (
        _STEP,
        _STEP
        + "        if world.rank == 1:\n"
        + "            with torch.no_grad():\n"
        + "                model[0].bias.clamp_(-0.01, 0.01)\n",
        "changed between two steps",
    ),
    "other parameters by rank": (
        _SGD,
        "torch.optim.SGD([*model.parameters()][world.rank:], lr=0.1, momentum=0.9)",
        "has other parameters",
    ),
    "clipped by each rank": (
        _STEP,
        "        x.norm()\n"
        "        nn.utils.clip_grad_norm_(model.parameters(), 0.01 * (1 + world.rank))\n" + _STEP,
        "clipping",
    ),
    "a loss that compares samples": (
        _MEAN,
        "        loss = lockstep.mean((losses - losses.mean().detach()).square())\n",
        "depend on its other samples",
    ),
}


# Where parts of different sizes would hide the mistake behind a mean of means.
EVEN = {"a loss that compares samples"}


def program(name: str) -> tuple[str, str]:
    """The script with this mistake, and the words that name its cause."""
    old, new, words = MISTAKES[name]
    assert old in BODY, old
    text = BODY.replace(old, new)
    return text.replace("batch_size=21", "batch_size=20") if name in EVEN else text, words
