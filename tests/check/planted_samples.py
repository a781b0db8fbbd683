"""Programs with mistakes about samples: which ones a rank has, and what it makes of them."""

from __future__ import annotations

from tests.check.programs import (
    EVEN,
    LOADER,
    LOSS,
    MODEL,
    STEP,
    Planted,
    usual,
)

_SCRATCH = """\
class Scratch(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("center", torch.zeros(6))
        self.net = net()
    def forward(self, x):
        if self.training:
            self.center.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return self.net(x - self.center)
"""

SAMPLES: dict[str, Planted] = {
    "a batch standardised by each rank": Planted(
        usual(("model(x)", "model((x - x.mean(0)) / x.std(0))")), "what mean (train.py"
    ),
    "outputs standardised by each rank": Planted(
        usual(
            (
                LOSS,
                "        h = model(x)\n        h = h - h.mean(0)\n"
                "        loss = lockstep.mean(losses_of(h, y))\n",
            )
        ),
        "what mean (train.py",
    ),
    "mixed up within each rank": Planted(
        usual(
            (
                LOSS,
                "        order = torch.randperm(len(x))\n        x = 0.7 * x + 0.3 * x[order]\n"
                + LOSS,
            )
        ),
        "permutes the samples of each rank's own part",
    ),
    "mixed up by a number of each rank": Planted(
        usual(
            (
                LOSS,
                "        by = np.random.beta(1.0, 1.0)\n        order = torch.randperm(len(x))\n"
                "        x = by * x + (1 - by) * x[order]\n        x = x.float()\n" + LOSS,
            )
        ),
        "permutes the samples of each rank's own part",
    ),
    "the hardest of each rank": Planted(
        usual(
            (
                LOSS,
                "        losses = losses_of(model(x), y)\n"
                "        loss = lockstep.mean(losses.topk(len(losses) // 2).values)\n",
            ),
            EVEN,
        ),
        "topk (train.py",
    ),
    "losses above each rank's median": Planted(
        usual(
            (
                LOSS,
                "        losses = losses_of(model(x), y)\n"
                "        loss = lockstep.mean(losses, weight=losses > losses.median())\n",
            )
        ),
        "median",
    ),
    "pairs of each rank": Planted(
        usual(
            (
                LOSS,
                "        h = F.normalize(model(x), dim=1)\n"
                "        near = h @ h.T\n"
                "        loss = lockstep.mean(losses_of(near, torch.arange(len(x))))\n",
            )
        ),
        None,
    ),
    "a running buffer of each rank": Planted(
        _SCRATCH + usual((MODEL, "model = lockstep.parallelize(Scratch())\n")),
        "what mean (train.py",
    ),
    "buffers that nobody keeps in step": Planted(
        _SCRATCH
        + usual(
            (
                MODEL,
                'model = lockstep.parallelize(Scratch(), broadcast_buffers={"*": "local"})\n',
            )
        ),
        "what mean (train.py",
    ),
    "a count of each rank's samples": Planted(
        usual(
            (MODEL, MODEL + 'model.register_buffer("seen", torch.zeros(()))\n'),
            (STEP, STEP + "        model.seen += len(x)\n"),
        ),
        None,
    ),
    "initial values from a rank's first batch": Planted(
        """\
class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.shift, self.is_set = nn.Parameter(torch.zeros(6)), False
    def forward(self, x):
        if not self.is_set:
            self.shift.data.copy_(-x.mean(0))
            self.is_set = True
        return x + self.shift
"""
        + usual((MODEL, "model = lockstep.parallelize(nn.Sequential(Scale(), net()))\n")),
        "before its first step",
    ),
    "torch's sampler, which pads": Planted(
        usual(
            (
                LOADER,
                "torch.utils.data.DataLoader(part, 10, sampler=DistributedSampler("
                "part, world.world_size, world.rank))",
            ),
            (MODEL, MODEL + "part = Subset(data, range(61))\n"),
        ),
        "gives some samples twice",
    ),
    "parts that overlap": Planted(
        usual(
            (LOADER, "torch.utils.data.DataLoader(part, 10)"),
            (
                MODEL,
                MODEL + "part = Subset(data, range(30 * world.rank, 30 * world.rank + 40))\n",
            ),
        ),
        "gives the same samples to several ranks",
    ),
    "no sampler": Planted(
        usual((LOADER, "torch.utils.data.DataLoader(data, 21)")), "doesn't divide the samples"
    ),
    "a stream that nobody divides": Planted(
        """\
class Stream(IterableDataset):
    def __iter__(self):
        yield from zip(X, Y)
"""
        + usual((LOADER, "torch.utils.data.DataLoader(Stream(), 21)")),
        "doesn't divide the samples",
    ),
    "an overlap of two classes": Planted(
        usual(
            (
                LOSS,
                "        p, t = model(x).softmax(1)[:, 0], (y == 0).float()\n"
                "        loss = 1 - 2 * (p * t).sum() / (p.sum() + t.sum())\n",
            )
        ),
        "adds up each rank's own samples",
    ),
    "weights of classes in a rank's part": Planted(
        usual(
            (
                LOSS,
                "        rare = 1 / torch.bincount(y, minlength=3).clamp(min=1)\n"
                "        loss = lockstep.mean(losses_of(model(x), y), weight=rare[y])\n",
            )
        ),
        None,
    ),
    "samples mixed up in collate_fn": Planted(
        usual(
            (LOADER, "loader_of(collate_fn=mix)"),
            (
                MODEL,
                "def mix(samples):\n    x, y = torch.utils.data.default_collate(samples)\n"
                "    return 0.5 * x + 0.5 * x.flip(0), y\n" + MODEL,
            ),
        ),
        None,
    ),
    "by the largest of a rank's part": Planted(
        usual(("model(x)", "model(x / x.abs().max())")), "what max (train.py"
    ),
}
