"""Programs that train right, with data as people have it: a check finds nothing in them."""

from __future__ import annotations

from tests.check.programs import (
    LOADER,
    LOSS,
    MODEL,
    usual,
)

DATA: dict[str, str] = {
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
    "a count in the batch": usual(
        (LOADER, "loader_of(collate_fn=collate)"),
        ("for x, y in", "for count, x, y in"),
        (
            MODEL,
            "collate = lambda rows: (len(rows), *torch.utils.data.default_collate(rows))\n" + MODEL,
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
        (LOADER, "loader_of(Dicts())"),
        ("for x, y in", "for batch in"),
        ("model(x), y", 'model(batch["x"]), batch["more"]["y"]'),
        (
            MODEL,
            "class Dicts(Dataset):\n    __len__ = lambda self: 90\n"
            '    __getitem__ = lambda self, i: {"x": X[i], "more": {"y": Y[i], "id": str(i)}}\n'
            + MODEL,
        ),
    ),
    "objects": usual(
        (LOADER, "loader_of(collate_fn=Batch)"),
        ("for x, y in", "for batch in"),
        ("model(x), y", "model(batch.x), batch.y"),
        (
            MODEL,
            "class Batch:\n    def __init__(self, samples):\n"
            "        self.x, self.y = torch.utils.data.default_collate(samples)\n" + MODEL,
        ),
    ),
    "two loaders at once": usual(
        (
            "for x, y in loader_of()",
            "for (x, y), (more, _) in zip(loader_of(), loader_of(size=30))",
        ),
        (LOSS, LOSS + "        loss = loss + 0.1 * lockstep.mean(model(more).square().sum(1))\n"),
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
        (LOADER, "loader_of(Noisy(), num_workers=2)"),
        (
            MODEL,
            "class Noisy(Dataset):\n    __len__ = lambda self: 90\n"
            "    def __getitem__(self, i):\n"
            "        x = X[i] + 0.1 * torch.randn(6) + random.random() + np.random.rand()\n"
            "        return x.float(), Y[i]\n" + MODEL,
        ),
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
    "global batches that the program cuts": usual(
        (
            "loader_of()",
            "torch.utils.data.DataLoader(data, 20, shuffle=True)",
        ),
        (LOSS, "        x, y = (t[world.rank :: world.world_size] for t in (x, y))\n" + LOSS),
    ),
    "a torch loader of a class of the program's": usual(
        (LOADER, "Doubled(data, 7, sampler=lockstep.DistributedSampler(data))"),
        (
            MODEL,
            "class Doubled(torch.utils.data.DataLoader):\n    def __iter__(self):\n"
            "        for x, y in super().__iter__():\n            yield 2 * x, y\n" + MODEL,
        ),
    ),
    "random masks in collate_fn": usual(
        (LOADER, "loader_of(collate_fn=mask)"),
        (
            MODEL,
            "def mask(samples):\n    x, y = torch.utils.data.default_collate(samples)\n"
            "    return x * (torch.rand(x.shape) < 0.8), y\n" + MODEL,
        ),
    ),
    "lists of indices": usual(
        (LOADER, "lockstep.DataLoader(Rows(), batch_size=None, sampler=order)"),
        (
            MODEL,
            "class Rows(Dataset):\n    __len__ = lambda self: 90\n"
            "    __getitem__ = lambda self, index: (X[index], Y[index])\n"
            "random_order = torch.utils.data.RandomSampler(range(90))\n"
            "order = torch.utils.data.BatchSampler(random_order, 21, False)\n" + MODEL,
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
        (LOADER, "torch.utils.data.DataLoader(Stream(), 7)"),
        (
            MODEL,
            "class Stream(IterableDataset):\n    def __iter__(self):\n"
            "        for n in range(world.rank, 84, world.world_size):\n"
            "            yield X[n], Y[n]\n" + MODEL,
        ),
    ),
    "samples that collate_fn changes": usual(
        (LOADER, "loader_of(Pairs(), collate_fn=collate)"),
        (
            MODEL,
            "class Pairs(Dataset):\n    __len__ = lambda self: 90\n"
            '    __getitem__ = lambda self, i: {"x": X[i], "y": Y[i], "open": open(os.devnull)}\n'
            'def collate(samples):\n    [each.pop("open").close() for each in samples]\n'
            '    labels = torch.stack([each.pop("y") for each in samples])\n'
            '    return torch.stack([each["x"] for each in samples]), labels\n' + MODEL,
        ),
    ),
    "samples that collate_fn takes apart": usual(
        (LOADER, "loader_of(Dicts(), collate_fn=collate)"),
        ("model(x), y", "model(x.sum(1, keepdim=True).expand(-1, 6) / 20), y"),
        (
            MODEL,
            "class Dicts(Lists):\n"
            '    __getitem__ = lambda self, i: {"x": self.rows[i].float(), "y": Y[i]}\n'
            "def collate(samples):\n"
            '    labels = torch.stack([each.pop("y") for each in samples])\n'
            '    rows = [each.pop("x") for each in samples]\n'
            "    return nn.utils.rnn.pad_sequence(rows, batch_first=True), labels\n" + MODEL,
        ),
    ),
}
