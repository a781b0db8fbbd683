"""Programs with a mistake in each, and words of the cause that a check may name.

Where the words are None no cause is to be named: what is known of the difference is told, or
nothing shows. ``code`` is what the check exits with.
"""

from __future__ import annotations

from typing import NamedTuple

from tests.check.right import BEGIN, FREE, usual

_BACKWARD = "        loss.backward()\n"
_STEP = "        optimizer.step()\n"
_LOSS = "        loss = lockstep.mean(losses_of(model(x), y))\n"
_MODEL = "model = lockstep.parallelize(net())\n"
_OPTIONS = "SGD(model.parameters(), lr=0.1, momentum=0.9)"
_SGD = f"optimizer = torch.optim.{_OPTIONS}\n"
_LOADER = "loader_of()"
_EVEN = (_LOADER, "loader_of(size=20)")


class Planted(NamedTuple):
    """A program with a mistake, and what a check says of it."""

    body: str
    words: str | None  # of the cause
    code: int = 1


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

MISTAKES: dict[str, Planted] = {
    "torch's mean of means": Planted(
        usual((_LOSS, "        loss = F.cross_entropy(model(x), y)\n")),
        "mean of means: cross_entropy",
    ),
    "losses that are averaged": Planted(
        usual((_LOSS, "        loss = losses_of(model(x), y).mean()\n")), "mean of means: mean"
    ),
    "a sum by the number of a rank's samples": Planted(
        usual((_LOSS, "        loss = losses_of(model(x), y).sum() / len(x)\n")),
        "mean of means: each rank divides",
    ),
    "a sum by the number of a rank's tokens": Planted(
        """\
model = lockstep.parallelize(nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 20)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
for words, _ in loader_of(Lists(), collate_fn=pad):
    seen = (words != 0).float()
    losses = F.cross_entropy(model(words).transpose(1, 2), words, reduction="none")
    step(optimizer, (losses * seen).sum() / seen.sum())
""",
        "sum (train.py",
    ),
    "torch's mean over tokens": Planted(
        """\
model = lockstep.parallelize(nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 20)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
for words, _ in loader_of(Lists(), size=20, collate_fn=pad):
    given = model(words).flatten(0, 1)
    step(optimizer, F.cross_entropy(given, words.flatten(), ignore_index=0))
""",
        "what cross_entropy (train.py",
    ),
    "the sum for the mean": Planted(
        usual((_LOSS, "        loss = losses_of(model(x), y).sum()\n"), ("0.1,", "0.001,")),
        "adds up each rank's own samples",
    ),
    "the sum for the mean, with Adam": Planted(
        usual(
            (_LOSS, "        loss = losses_of(model(x), y).sum()\n"),
            (_OPTIONS, "Adam(model.parameters(), lr=0.01, eps=1e-2)"),
        ),
        "adds up each rank's own samples",
    ),
    "times the number of ranks": Planted(
        usual((_LOSS, _LOSS + "        loss = loss * world.world_size\n")), "number of ranks"
    ),
    "by the number of ranks": Planted(
        usual((_BACKWARD, "        (loss / world.world_size).backward()\n")), "number of ranks"
    ),
    "a penalty times the number of ranks": Planted(
        usual(
            (
                _LOSS,
                _LOSS + "        loss = loss + 0.01 * world.world_size * sum("
                "p.square().sum() for p in model.parameters())\n",
            )
        ),
        "number of ranks",
    ),
    "a penalty on rank 0": Planted(
        usual(
            (
                _LOSS,
                _LOSS + "        if world.rank == 0 and world.world_size > 1:\n"
                "            loss = loss + 0.1 * model[0].weight.square().sum()\n",
            )
        ),
        None,
    ),
    "BatchNorm": Planted(
        usual((_MODEL, _MODEL.replace("net()", "net(nn.BatchNorm1d(8))"))), "BatchNorm"
    ),
    "BatchNorm in torch's DDP": Planted(
        usual(
            (_MODEL, "model = nn.parallel.DistributedDataParallel(net(nn.BatchNorm1d(8)))\n"),
            (_LOSS, "        loss = F.cross_entropy(model(x), y)\n"),
            _EVEN,
        ).replace(
            "model = nn",
            "if not dist.is_initialized():\n    dist.init_process_group("
            '"gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)\nmodel = nn',
        ),
        "BatchNorm",
    ),
    "a batch standardised by each rank": Planted(
        usual(("model(x)", "model((x - x.mean(0)) / x.std(0))")), "what mean (train.py"
    ),
    "outputs standardised by each rank": Planted(
        usual(
            (
                _LOSS,
                "        h = model(x)\n        h = h - h.mean(0)\n"
                "        loss = lockstep.mean(losses_of(h, y))\n",
            )
        ),
        "what mean (train.py",
    ),
    "mixed up within each rank": Planted(
        usual(
            (
                _LOSS,
                "        order = torch.randperm(len(x))\n        x = 0.7 * x + 0.3 * x[order]\n"
                + _LOSS,
            )
        ),
        "permutes the samples of each rank's own part",
    ),
    "mixed up by a number of each rank": Planted(
        usual(
            (
                _LOSS,
                "        by = np.random.beta(1.0, 1.0)\n        order = torch.randperm(len(x))\n"
                "        x = by * x + (1 - by) * x[order]\n        x = x.float()\n" + _LOSS,
            )
        ),
        "permutes the samples of each rank's own part",
    ),
    "the hardest of each rank": Planted(
        usual(
            (
                _LOSS,
                "        losses = losses_of(model(x), y)\n"
                "        loss = lockstep.mean(losses.topk(len(losses) // 2).values)\n",
            ),
            _EVEN,
        ),
        "topk (train.py",
    ),
    "losses above each rank's median": Planted(
        usual(
            (
                _LOSS,
                "        losses = losses_of(model(x), y)\n"
                "        loss = lockstep.mean(losses, weight=losses > losses.median())\n",
            )
        ),
        "median",
    ),
    "pairs of each rank": Planted(
        usual(
            (
                _LOSS,
                "        h = F.normalize(model(x), dim=1)\n"
                "        near = h @ h.T\n"
                "        loss = lockstep.mean(losses_of(near, torch.arange(len(x))))\n",
            )
        ),
        None,
    ),
    "a running buffer of each rank": Planted(
        _SCRATCH + usual((_MODEL, "model = lockstep.parallelize(Scratch())\n")),
        "what mean (train.py",
    ),
    "buffers that nobody keeps in step": Planted(
        _SCRATCH
        + usual(
            (
                _MODEL,
                'model = lockstep.parallelize(Scratch(), broadcast_buffers={"*": "local"})\n',
            )
        ),
        "what mean (train.py",
    ),
    "a count of each rank's samples": Planted(
        usual(
            (_MODEL, _MODEL + 'model.register_buffer("seen", torch.zeros(()))\n'),
            (_STEP, _STEP + "        model.seen += len(x)\n"),
        ),
        None,
    ),
    "clipped by each rank": Planted(
        usual(
            (
                _BACKWARD,
                "        with lockstep.no_sync(model):\n"
                "            (0.5 * loss).backward()\n"
                "            nn.utils.clip_grad_norm_(model.parameters(), 0.1)\n"
                "        lockstep.mean(losses_of(model(x), y)).backward()\n",
            )
        ),
        "clip_grad_norm_ (train.py",
    ),
    "clipped by norms of each rank": Planted(
        usual(
            (
                _STEP,
                "        nn.utils.clip_grad_norm_(model.parameters(), 0.001 * x.norm())\n" + _STEP,
            )
        ),
        "clip_grad_norm_ (train.py",
    ),
    "a step under no_sync": Planted(
        usual((_BACKWARD, "        with lockstep.no_sync(model):\n            loss.backward()\n")),
        "no_sync (train.py",
    ),
    "no parallel model": Planted(usual((_MODEL, "model = net()\n")), "the model isn't parallel"),
    "a part outside of the model": Planted(
        usual((_MODEL, "model = net()\nlockstep.parallelize(model[0])\n")),
        "outside of the parallel model",
    ),
    "a parameter of the loss": Planted(
        usual(
            (_MODEL, _MODEL + "scale = nn.Parameter(torch.ones(()))\n"),
            (_OPTIONS, "SGD([*model.parameters(), scale], lr=0.1)"),
            ("model(x)", "scale * model(x)"),
        ),
        "outside of the parallel model",
    ),
    "seeds of each rank, and nothing parallel at first": Planted(
        usual(
            (
                _MODEL,
                "torch.manual_seed(world.rank)\nmodel = net()\n",
            ),
            (_BACKWARD, _BACKWARD + "        lockstep.average_gradients(model, weight=len(x))\n"),
            ("lockstep.mean(losses_of(model(x), y))", "F.cross_entropy(model(x), y)"),
        ),
        "start from different parameters",
    ),
    "a fixed projection of each rank": Planted(
        usual(
            (_MODEL, _MODEL + "torch.manual_seed(world.rank)\nmix = torch.randn(6, 6)\n"),
            ("model(x)", "model(x @ mix)"),
        ),
        "seeds differ",
    ),
    "a learning rate for the ranks": Planted(
        usual(("lr=0.1", "lr=0.1 * world.world_size")), "lr is 0.2 and 0.1"
    ),
    "a learning rate by rank": Planted(
        usual(("lr=0.1", "lr=0.1 * (1 + world.rank)")), "lr is 0.1 and 0.2"
    ),
    "a plateau of a rank's own loss": Planted(
        usual(
            (
                _SGD,
                _SGD + "plan = torch.optim.lr_scheduler.ReduceLROnPlateau("
                "optimizer, patience=0, threshold=0.0)\n",
            ),
            (_STEP, _STEP + "        plan.step(losses_of(model(x), y).mean().item())\n"),
        ),
        "lr is",
    ),
    "steps left out": Planted(
        usual((_STEP, "        if world.rank == 0:\n            optimizer.step()\n")),
        "leaves out steps",
    ),
    "parameters changed by one rank": Planted(
        usual(
            (
                _STEP,
                _STEP + "        if world.rank == 1:\n            with torch.no_grad():\n"
                "                model[0].bias.clamp_(-0.01, 0.01)\n",
            )
        ),
        "changed between two steps",
    ),
    "other parameters by rank": Planted(
        usual(("model.parameters()", "[*model.parameters()][world.rank :]")), None
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
        + usual((_MODEL, "model = lockstep.parallelize(nn.Sequential(Scale(), net()))\n")),
        "before its first step",
    ),
    "gradients kept on one rank": Planted(
        usual(
            (
                "        optimizer.zero_grad()\n",
                "        if world.rank == 0:\n            optimizer.zero_grad()\n",
            )
        ),
        "gradients are kept",
    ),
    "the same noise on all ranks": Planted(
        usual(("model(x)", "model(x + 0.1 * torch.randn_like(x))")), "all ranks draw the same ones"
    ),
    "torch's sampler, which pads": Planted(
        usual(
            (
                _LOADER,
                "torch.utils.data.DataLoader(part, 10, sampler=DistributedSampler("
                "part, world.world_size, world.rank))",
            ),
            (_MODEL, _MODEL + "part = Subset(data, range(61))\n"),
        ),
        "gives some samples twice",
    ),
    "parts that overlap": Planted(
        usual(
            (_LOADER, "torch.utils.data.DataLoader(part, 10)"),
            (
                _MODEL,
                _MODEL + "part = Subset(data, range(30 * world.rank, 30 * world.rank + 40))\n",
            ),
        ),
        "gives the same samples to several ranks",
    ),
    "no sampler": Planted(
        usual((_LOADER, "torch.utils.data.DataLoader(data, 21)")), "doesn't divide the samples"
    ),
    "a stream that nobody divides": Planted(
        """\
class Stream(IterableDataset):
    def __iter__(self):
        yield from zip(X, Y)
"""
        + usual((_LOADER, "torch.utils.data.DataLoader(Stream(), 21)")),
        "doesn't divide the samples",
    ),
    "the loss by the number of micro-batches": Planted(
        """\
model = lockstep.parallelize(net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = iter(loader_of(size=9))
for _ in range(4):
    with lockstep.accumulate(model):
        x, y = next(batches)
        (lockstep.mean(losses_of(model(x), y)) / 2).backward()
    x, y = next(batches)
    (lockstep.mean(losses_of(model(x), y)) / 2).backward()
    optimizer.step()
    optimizer.zero_grad()
""",
        "number of micro-batches",
    ),
    "a metric of each rank": Planted(
        usual((_STEP, _STEP + "        print((model(x).argmax(1) == y).float().mean().item())\n")),
        None,
        0,
    ),
    "an average of the weights on one rank": Planted(
        usual(
            (_SGD, _SGD + "average = copy.deepcopy(model)\n"),
            (
                _STEP,
                _STEP + "        if world.rank == 0:\n"
                "            for own, p in zip(average.parameters(), model.parameters()):\n"
                "                own.data.lerp_(p.data, 0.1)\n",
            ),
        ),
        None,
    ),
    "weights that one rank evaluates": Planted(
        usual(
            (
                _STEP,
                _STEP + "        kept = [p.detach().clone() for p in model.parameters()]\n"
                "        with torch.no_grad():\n"
                "            for p in model.parameters():\n"
                "                p.mul_(1 - 0.1 * world.rank)\n"
                "            model.eval()(X[:9])\n"
                "            for p, old in zip(model.parameters(), kept):\n"
                "                p.copy_(old)\n"
                "        model.train()\n",
            )
        ),
        None,
    ),
    "weights of training that are evaluated": Planted(
        FREE
        + usual(
            (f"torch.optim.{_OPTIONS}", "Free(model.parameters())"),
            (
                _STEP,
                _STEP + "        with torch.no_grad():\n            model.eval()(x)\n"
                "        model.train()\n",
            ),
        ),
        "its eval() isn't called",
    ),
    "initial values from rank 0's first batch": Planted(
        usual(
            (
                _MODEL,
                "x, _ = next(iter(loader_of()))\nmodel = net()\n"
                "model[0].bias.data.fill_(-x[:, 0].mean())\nlockstep.parallelize(model)\n",
            )
        ),
        "initial values depend on a rank's own samples",
    ),
    "an overlap of two classes": Planted(
        usual(
            (
                _LOSS,
                "        p, t = model(x).softmax(1)[:, 0], (y == 0).float()\n"
                "        loss = 1 - 2 * (p * t).sum() / (p.sum() + t.sum())\n",
            )
        ),
        "adds up each rank's own samples",
    ),
    "weights of classes in a rank's part": Planted(
        usual(
            (
                _LOSS,
                "        rare = 1 / torch.bincount(y, minlength=3).clamp(min=1)\n"
                "        loss = lockstep.mean(losses_of(model(x), y), weight=rare[y])\n",
            )
        ),
        None,
    ),
    "gradients that are added up by hand": Planted(
        usual(
            (_MODEL, "model = net()\n"),
            (
                _BACKWARD,
                _BACKWARD + "        for p in model.parameters():\n"
                "            if world.world_size > 1:\n                dist.all_reduce(p.grad)\n",
            ),
            (_LOSS, "        loss = F.cross_entropy(model(x), y)\n"),
            _EVEN,
        ),
        None,
    ),
    "samples mixed up in collate_fn": Planted(
        usual(
            (_LOADER, "loader_of(collate_fn=mix)"),
            (
                _MODEL,
                "def mix(samples):\n    x, y = torch.utils.data.default_collate(samples)\n"
                "    return 0.5 * x + 0.5 * x.flip(0), y\n" + _MODEL,
            ),
        ),
        None,
    ),
    "by the largest of a rank's part": Planted(
        usual(("model(x)", "model(x / x.abs().max())")), "what max (train.py"
    ),
    "steps that a rank's own loss leaves out": Planted(
        usual(
            (
                _STEP,
                "        if losses_of(model(x), y).mean() < 1.1:\n            optimizer.step()\n",
            )
        ),
        "leaves out steps",
    ),
    "a state of the optimizer on one rank": Planted(
        usual(
            (
                _SGD,
                _SGD + "if world.rank == 1:\n    for p in model.parameters():\n"
                '        optimizer.state[p]["momentum_buffer"] = torch.ones_like(p)\n',
            )
        ),
        None,
    ),
    "two mistakes": Planted(
        usual(
            (_MODEL, _MODEL.replace("net()", "net(nn.BatchNorm1d(8))")),
            (_LOSS, "        loss = F.cross_entropy(model(x), y)\n"),
        ),
        "BatchNorm",
    ),
}


def programs() -> dict[str, tuple[str, Planted]]:
    """All of them, by name."""
    return {name: (BEGIN + each.body, each) for name, each in MISTAKES.items()}
