"""Programs that train right, as people write them: a check finds nothing in them.

A program is ``BEGIN`` and one of ``RIGHT``. Global batches are of 21 samples, which two ranks
divide unevenly, unless ranks have to have equally many.
"""

from __future__ import annotations

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
_BACKWARD = "        loss.backward()\n"
_STEP = "        optimizer.step()\n"
_LOSS = "        loss = lockstep.mean(losses_of(model(x), y))\n"
_MODEL = "model = lockstep.parallelize(net())\n"
_SGD = "optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)\n"
_LOADER = "loader_of()"


def usual(*changes: tuple[str, str]) -> str:
    """The usual loop with other lines."""
    text = USUAL
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    return text


RIGHT: dict[str, str] = {
    "usual": USUAL,
    "offsets of an EmbeddingBag": """\
def collate(samples):
    rows, labels = zip(*samples)
    offsets = torch.tensor([0, *map(len, rows[:-1])]).cumsum(0)
    return torch.cat(rows), offsets, torch.stack(labels)
class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag, self.out = nn.EmbeddingBag(20, 8), nn.Linear(8, 3)
    def forward(self, words, offsets):
        return self.out(self.bag(words, offsets))
model = lockstep.parallelize(Bag())
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for words, offsets, y in loader_of(Lists(), collate_fn=collate):
    step(optimizer, lockstep.mean(losses_of(model(words, offsets), y)))
""",
    "sparse gradients": """\
def collate(samples):
    rows, labels = zip(*samples)
    return torch.cat(rows), torch.tensor([len(row) for row in rows]), torch.stack(labels)
bag, out = nn.EmbeddingBag(20, 8, sparse=True), nn.Linear(8, 3)
for each in (bag, out):
    lockstep.parallelize(each)
optimizers = torch.optim.SparseAdam(bag.parameters()), torch.optim.SGD(out.parameters(), lr=0.1)
for words, lengths, y in loader_of(Lists(), collate_fn=collate):
    offsets = lengths.cumsum(0) - lengths
    loss = lockstep.mean(losses_of(out(bag(words, offsets)), y))
    for each in optimizers:
        each.zero_grad()
    loss.backward()
    for each in optimizers:
        each.step()
""",
    "a count in the batch": usual(
        (_LOADER, "loader_of(collate_fn=collate)"),
        ("for x, y in", "for count, x, y in"),
        (
            _MODEL,
            "collate = lambda rows: (len(rows), *torch.utils.data.default_collate(rows))\n"
            + _MODEL,
        ),
        ("lockstep.mean(losses_of(model(x), y))", "lockstep.mean(losses_of(model(x), y)[:count])"),
    ),
    "lists of sequences": """\
model = nn.ModuleDict({"words": nn.Embedding(20, 8), "out": nn.Linear(8, 3)})
lockstep.parallelize(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for batch in loader_of(Lists(), collate_fn=list):
    y = [model["out"](model["words"](row).mean(0)) for row, _ in batch]
    step(optimizer, lockstep.mean(losses_of(torch.stack(y), torch.stack([t for _, t in batch]))))
""",
    "padded batches and a mean over tokens": """\
model = lockstep.parallelize(nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 20)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for words, _ in loader_of(Lists(), collate_fn=pad):
    losses = F.cross_entropy(model(words).transpose(1, 2), words, reduction="none")
    step(optimizer, lockstep.mean(losses, weight=words != 0))
""",
    "packed sequences": """\
words, rnn, out = nn.Embedding(20, 8), nn.GRU(8, 8, batch_first=True), nn.Linear(8, 3)
model = lockstep.parallelize(nn.ModuleList([words, rnn, out]))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for x, y in loader_of(Lists(), collate_fn=pad):
    packed = nn.utils.rnn.pack_padded_sequence(
        words(x), (x != 0).sum(1), batch_first=True, enforce_sorted=False
    )
    step(optimizer, lockstep.mean(losses_of(out(rnn(packed)[1][0]), y)))
""",
    "a transformer with a padding mask": """\
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.place = nn.Embedding(20, 8), nn.Embedding(8, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.out = nn.Linear(8, 3)
    def forward(self, x):
        h = self.words(x) + self.place(torch.arange(x.shape[1]))
        h = self.layer(h, src_key_padding_mask=x == 0)
        seen = (x != 0).unsqueeze(2)
        return self.out((h * seen).sum(1) / seen.sum(1))
model = lockstep.parallelize(Model())
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for x, y in loader_of(Lists(), collate_fn=pad):
    step(optimizer, lockstep.mean(losses_of(model(x), y)))
""",
    "dicts": usual(
        (_LOADER, "loader_of(Dicts())"),
        ("for x, y in", "for batch in"),
        ("model(x), y", 'model(batch["x"]), batch["more"]["y"]'),
        (
            _MODEL,
            "class Dicts(Dataset):\n    __len__ = lambda self: 90\n"
            '    __getitem__ = lambda self, i: {"x": X[i], "more": {"y": Y[i], "id": str(i)}}\n'
            + _MODEL,
        ),
    ),
    "objects": usual(
        (_LOADER, "loader_of(collate_fn=Batch)"),
        ("for x, y in", "for batch in"),
        ("model(x), y", "model(batch.x), batch.y"),
        (
            _MODEL,
            "class Batch:\n    def __init__(self, samples):\n"
            "        self.x, self.y = torch.utils.data.default_collate(samples)\n" + _MODEL,
        ),
    ),
    "accumulated micro-batches": """\
model = lockstep.parallelize(net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = [*loader_of(size=9)]
for first in range(0, len(batches) - 1, 2):
    with lockstep.accumulate(model):
        x, y = batches[first]
        lockstep.mean(losses_of(model(x), y)).backward()
    x, y = batches[first + 1]
    lockstep.mean(losses_of(model(x), y)).backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    "half a square, accumulated": """\
model = lockstep.parallelize(nn.Linear(6, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = iter(loader_of(size=9))
for _ in range(4):
    with lockstep.accumulate(model):
        x, y = next(batches)
        (0.5 * lockstep.mean((model(x)[:, 0] - y).square())).backward()
    x, y = next(batches)
    (0.5 * lockstep.mean((model(x)[:, 0] - y).square())).backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    "join": """\
model = lockstep.parallelize(net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
mine = Subset(data, range(50) if world.rank == 0 else range(50, 90))
with lockstep.join(model):
    for x, y in torch.utils.data.DataLoader(mine, 20):
        step(optimizer, lockstep.mean(losses_of(model(x), y)))
""",
    "SyncBatchNorm": usual(
        (
            _MODEL,
            "model = lockstep.SyncBatchNorm.convert_sync_batchnorm(net(nn.BatchNorm1d(8)))\n"
            "lockstep.parallelize(model)\n",
        )
    ),
    "dropout, LayerNorm and a wrapper": usual(
        (
            _MODEL,
            "model = lockstep.DistributedDataParallel(net(nn.LayerNorm(8), nn.Dropout(0.2)))\n",
        )
    ),
    "two models": """\
encoder, decoder = lockstep.parallelize(nn.Linear(6, 4)), lockstep.parallelize(nn.Linear(4, 6))
optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=0.01)
for x, _ in loader_of():
    step(optimizer, lockstep.mean((decoder(encoder(x).relu()) - x).square()))
""",
    "a GAN": """\
maker, judge = (lockstep.parallelize(nn.Linear(6, n)) for n in (6, 1))
one, other = (torch.optim.Adam(m.parameters(), lr=0.01) for m in (maker, judge))
for x, noise in loader_of(TensorDataset(X, X.flip(0))):
    fake = maker(noise)
    step(other, lockstep.mean(judge(fake.detach()) - judge(x)))
    step(one, lockstep.mean(-judge(fake)))
""",
    "a sharded optimizer that clips": usual(
        (_SGD, _SGD + "optimizer = lockstep.shard_optimizer(optimizer)\n"),
        (_STEP, "        lockstep.clip_grad_norm_(model.parameters(), 0.1)\n" + _STEP),
    ),
    "torch's clipping": usual(
        (_STEP, "        nn.utils.clip_grad_norm_(model.parameters(), 0.1)\n" + _STEP),
        ("SGD(model.parameters(), lr=0.1, momentum=0.9)", "AdamW(model.parameters())"),
    ),
    "a schedule of the learning rate": usual(
        (_SGD, _SGD + "plan = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, 15)\n"),
        (_STEP, _STEP + "        plan.step()\n"),
    ),
    "a plateau of all ranks' loss": usual(
        (_SGD, _SGD + "plan = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)\n"),
        (_STEP, _STEP + '        plan.step(lockstep.reduce({"l": loss.item()}, "mean")["l"])\n'),
    ),
    "torch's averaged model": usual(
        (_SGD, _SGD + "average = torch.optim.swa_utils.AveragedModel(model)\n"),
        (_STEP, _STEP + "        average.update_parameters(model)\n"),
    ),
    "a moving average by hand": usual(
        (_SGD, _SGD + "average = copy.deepcopy(model).requires_grad_(False)\n"),
        (
            _STEP,
            _STEP + "        for own, p in zip(average.parameters(), model.parameters()):\n"
            "            own.lerp_(p.detach(), 0.1)\n",
        ),
    ),
    "distilled from a teacher": usual(
        (_SGD, _SGD + "teacher = net().eval().requires_grad_(False)\n"),
        (
            _LOSS,
            "        with torch.no_grad():\n            wanted = teacher(x).softmax(1)\n"
            "        given = model(x).log_softmax(1)\n"
            '        loss = lockstep.mean(F.kl_div(given, wanted, reduction="none").sum(1))\n',
        ),
    ),
    "two loaders at once": usual(
        (
            "for x, y in loader_of()",
            "for (x, y), (more, _) in zip(loader_of(), loader_of(size=30))",
        ),
        (_LOSS, _LOSS + "        loss = loss + 0.1 * lockstep.mean(model(more).square().sum(1))\n"),
    ),
    "an endless iterator": """\
def endless(loader):
    while True:
        yield from loader
model = lockstep.parallelize(net())
optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01)
batches = endless(loader_of(size=40))
for number in range(6):
    x, y = next(batches)
    step(optimizer, lockstep.mean(losses_of(model(x), y)))
""",
    "an evaluation after each step": usual(
        (
            _STEP,
            _STEP + "        model.eval()\n        with torch.no_grad():\n"
            "            right = sum((model(a).argmax(1) == b).sum().item() for a, b in test)\n"
            '        counts = lockstep.reduce({"right": right}, "sum")\n        model.train()\n',
        ),
        (_SGD, _SGD + "test = lockstep.DataLoader(Subset(data, range(31)), batch_size=10)\n"),
    ),
    "an evaluation of all samples on rank 0": usual(
        (
            _STEP,
            _STEP + "        if world.is_main if hasattr(world, 'is_main') else world.rank == 0:\n"
            "            with torch.no_grad():\n"
            "                [model.eval()(a) for a, b in torch.utils.data.DataLoader(data, 30)]\n"
            "        model.train()\n",
        ),
    ),
    "autocast in bfloat16": usual(
        (
            _LOSS,
            '        with torch.autocast("cpu", torch.bfloat16):\n            out = model(x)\n'
            "        loss = lockstep.mean(losses_of(out.float(), y))\n",
        )
    ),
    "checkpointed activations": usual(
        (
            "model(x), y",
            "model[2](torch.utils.checkpoint.checkpoint(model[:2], x, use_reentrant=False)), y",
        ),
        (_MODEL, "import torch.utils.checkpoint\n" + _MODEL),
    ),
    "saved and gone on with": usual(
        (
            "for epoch in range(3)",
            'start = lockstep.load("run", epoch=0)["epoch"] if os.path.exists("run") else 0\n'
            "for epoch in range(start, 3)",
        ),
        (_STEP, _STEP + '        lockstep.save("run", model=model, epoch=epoch)\n'),
    ),
    "an iterable dataset": """\
class Stream(IterableDataset):
    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        first, by = (0, 1) if info is None else (info.id, info.num_workers)
        for number in range(first, 84, by):
            yield X[number], Y[number]
model = lockstep.parallelize(net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in lockstep.DataLoader(Stream(), batch_size=20):
    step(optimizer, lockstep.mean(losses_of(model(x), y)))
""",
    "torch's DDP, sampler and loader": """\
if not dist.is_initialized():
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
model = nn.parallel.DistributedDataParallel(net())
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
sampler = DistributedSampler(data)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in torch.utils.data.DataLoader(data, 9, sampler=sampler):
        step(optimizer, F.cross_entropy(model(x), y))
""",
    "lockstep's sampler and torch's loader": usual(
        (
            "loader_of()",
            "torch.utils.data.DataLoader(data, 7, sampler=lockstep.DistributedSampler(data))",
        )
    ),
    "workers that draw random numbers": usual(
        (_LOADER, "loader_of(Noisy(), num_workers=2)"),
        (
            _MODEL,
            "class Noisy(Dataset):\n    __len__ = lambda self: 90\n"
            "    def __getitem__(self, i):\n"
            "        x = X[i] + 0.1 * torch.randn(6) + random.random() + np.random.rand()\n"
            "        return x.float(), Y[i]\n" + _MODEL,
        ),
    ),
    "frozen, then unfrozen": usual(
        (_SGD, _SGD + "model[0].requires_grad_(False)\n"),
        ("    for x, y in", "    model[0].requires_grad_(epoch > 0)\n    for x, y in"),
        ("loader_of()", "loader_of(size=45)"),
    ),
    "groups, and a decay that the loss has": usual(
        (
            "SGD(model.parameters(), lr=0.1, momentum=0.9)",
            'Adam([{"params": model[0].parameters(), "lr": 0.01}, '
            '{"params": model[2].parameters()}])',
        ),
        (
            _LOSS,
            _LOSS + "        loss = loss + 1e-3 * sum((p**2).sum() for p in model.parameters())\n",
        ),
    ),
    "a penalty of gradients": usual(
        (
            _LOSS,
            "        x.requires_grad_()\n        out = model(x)\n"
            "        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)\n"
            "        loss = lockstep.mean(losses_of(out, y) + 0.1 * slope.square().sum(1))\n",
        )
    ),
    "classes of different weight": usual(
        (_LOSS, "        loss = lockstep.mean(losses_of(model(x), y), weight=rare[y])\n"),
        (_SGD, _SGD + "rare = torch.tensor([1.0, 2.0, 5.0])\n"),
    ),
    "samples drawn with replacement": usual(
        (
            "loader_of()",
            "lockstep.DataLoader(data, 21, sampler="
            "torch.utils.data.WeightedRandomSampler(torch.ones(90), 90))",
        )
    ),
    "batches by hand": """\
model = lockstep.parallelize(net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for first in range(0, 84, 21):
    own = slice(first + world.rank, first + 21, world.world_size)
    step(optimizer, lockstep.mean(losses_of(model(X[own]), Y[own])))
""",
    "gradients averaged by hand": """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in loader_of():
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    lockstep.average_gradients(model, weight=len(x))
    optimizer.step()
""",
    "global batches that the program cuts": usual(
        (
            "loader_of()",
            "torch.utils.data.DataLoader(data, 20, shuffle=True)",
        ),
        (_LOSS, "        x, y = (t[world.rank :: world.world_size] for t in (x, y))\n" + _LOSS),
    ),
    "L-BFGS": """\
model = lockstep.parallelize(net())
optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
for x, y in loader_of(size=45):
    def closure():
        optimizer.zero_grad()
        loss = lockstep.mean(losses_of(model(x), y))
        loss.backward()
        return loss
    optimizer.step(closure)
""",
    "noise in training, on each rank its own": usual(
        (_SGD, _SGD + "torch.manual_seed(100 + world.rank)\n"),
        ("model(x)", "model(x + 0.1 * torch.randn_like(x))"),
    ),
    "layers left out at random, on all ranks alike": usual(
        ("model(x)", "(model(x) if random.random() < 0.5 else model[2](model[0](x)))"),
        (_SGD, _SGD + "random.seed(5)\n"),
    ),
    "a metric of a rank, printed": usual(
        (_STEP, _STEP + "        print((model(x).argmax(1) == y).float().mean().item())\n")
    ),
    "weights for evaluations": FREE
    + usual(
        ("torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)", "Free(model.parameters())"),
        (
            _STEP,
            _STEP + "        optimizer.eval()\n        with torch.no_grad():\n"
            "            model.eval()(x)\n        optimizer.train()\n        model.train()\n",
        ),
    ),
    "a torch loader of a class of the program's": usual(
        (_LOADER, "Doubled(data, 7, sampler=lockstep.DistributedSampler(data))"),
        (
            _MODEL,
            "class Doubled(torch.utils.data.DataLoader):\n    def __iter__(self):\n"
            "        for x, y in super().__iter__():\n            yield 2 * x, y\n" + _MODEL,
        ),
    ),
    "random masks in collate_fn": usual(
        (_LOADER, "loader_of(collate_fn=mask)"),
        (
            _MODEL,
            "def mask(samples):\n    x, y = torch.utils.data.default_collate(samples)\n"
            "    return x * (torch.rand(x.shape) < 0.8), y\n" + _MODEL,
        ),
    ),
    "scaled losses": usual(
        (
            _BACKWARD,
            "        scaler.scale(loss).backward()\n        scaler.unscale_(optimizer)\n"
            "        nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n",
        ),
        (_STEP, "        scaler.step(optimizer)\n        scaler.update()\n"),
        (_SGD, _SGD + 'scaler = torch.amp.GradScaler("cpu")\n'),
    ),
    "a redundancy optimizer": usual(
        (
            "torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)",
            "lockstep.ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)",
        )
    ),
    "lists of indices": usual(
        (_LOADER, "lockstep.DataLoader(Rows(), batch_size=None, sampler=order)"),
        (
            _MODEL,
            "class Rows(Dataset):\n    __len__ = lambda self: 90\n"
            "    __getitem__ = lambda self, index: (X[index], Y[index])\n"
            "random_order = torch.utils.data.RandomSampler(range(90))\n"
            "order = torch.utils.data.BatchSampler(random_order, 21, False)\n" + _MODEL,
        ),
    ),
    "a padded stream": """\
class Stream(IterableDataset):
    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        first, by = (0, 1) if info is None else (info.id, info.num_workers)
        lists = Lists()
        for number in range(first, 33, by):
            yield lists[number]
model = lockstep.parallelize(nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 20)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for words, _ in lockstep.DataLoader(Stream(), batch_size=10, collate_fn=pad):
    losses = F.cross_entropy(model(words).transpose(1, 2), words, reduction="none")
    step(optimizer, lockstep.mean(losses, weight=words != 0))
""",
    "a stream that divides itself": usual(
        (_LOADER, "torch.utils.data.DataLoader(Stream(), 7)"),
        (
            _MODEL,
            "class Stream(IterableDataset):\n    def __iter__(self):\n"
            "        for n in range(world.rank, 84, world.world_size):\n"
            "            yield X[n], Y[n]\n" + _MODEL,
        ),
    ),
    "initial values from all ranks' first batch": usual(
        (
            _SGD,
            "x, _ = next(iter(loader_of()))\ncenter = lockstep.mean(x[:, 0])\n"
            "model[0].bias.data.fill_(-center)\n" + _SGD,
        ),
    ),
    "a compiled model": usual(
        ("model(x)", "fast(x)"), (_SGD, _SGD + 'fast = torch.compile(model, backend="eager")\n')
    ),
    "samples that collate_fn changes": usual(
        (_LOADER, "loader_of(Pairs(), collate_fn=collate)"),
        (
            _MODEL,
            "class Pairs(Dataset):\n    __len__ = lambda self: 90\n"
            '    __getitem__ = lambda self, i: {"x": X[i], "y": Y[i], "open": open(os.devnull)}\n'
            'def collate(samples):\n    [each.pop("open").close() for each in samples]\n'
            '    labels = torch.stack([each.pop("y") for each in samples])\n'
            '    return torch.stack([each["x"] for each in samples]), labels\n' + _MODEL,
        ),
    ),
    "samples that collate_fn takes apart": usual(
        (_LOADER, "loader_of(Dicts(), collate_fn=collate)"),
        ("model(x), y", "model(x.sum(1, keepdim=True).expand(-1, 6) / 20), y"),
        (
            _MODEL,
            "class Dicts(Lists):\n"
            '    __getitem__ = lambda self, i: {"x": self.rows[i].float(), "y": Y[i]}\n'
            "def collate(samples):\n"
            '    labels = torch.stack([each.pop("y") for each in samples])\n'
            '    rows = [each.pop("x") for each in samples]\n'
            "    return nn.utils.rnn.pad_sequence(rows, batch_first=True), labels\n" + _MODEL,
        ),
    ),
    "tensors in no model, of two optimizers": """\
a, b = (nn.Parameter(torch.full((6, 3), 0.1 * n)) for n in (1, 2))
one, other = (torch.optim.Adam([each], lr=0.01) for each in (a, b))
for x, y in loader_of():
    loss = lockstep.mean(losses_of(x @ a + x.square() @ b, y))
    loss.backward()
    for each in (a, b):
        each.grad = lockstep.reduce({"g": each.grad}, "mean")["g"]
    for each in (one, other):
        each.step()
        each.zero_grad()
""",
    "a few rows of a table": """\
table = lockstep.parallelize(nn.Embedding(30, 4))
optimizer = torch.optim.Adagrad(table.parameters(), lr=0.1)
for x, y in loader_of(TensorDataset(torch.arange(90) % 30, Y)):
    step(optimizer, lockstep.mean((table(x).sum(1) - y).square()))
""",
}


def programs() -> dict[str, str]:
    """All of them, by name."""
    return {name: BEGIN + body for name, body in RIGHT.items()}
