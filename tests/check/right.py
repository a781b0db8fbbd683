"""Programs that train right, as people write them: a check finds nothing in them."""

from __future__ import annotations

from tests.check.programs import (
    BACKWARD,
    BEGIN,
    FREE,
    LOSS,
    MODEL,
    SGD,
    STEP,
    usual,
)
from tests.check.right_data import DATA

RIGHT: dict[str, str] = {
    **DATA,
    "usual": usual(),
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
            MODEL,
            "model = lockstep.SyncBatchNorm.convert_sync_batchnorm(net(nn.BatchNorm1d(8)))\n"
            "lockstep.parallelize(model)\n",
        )
    ),
    "dropout, LayerNorm and a wrapper": usual(
        (
            MODEL,
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
        (SGD, SGD + "optimizer = lockstep.shard_optimizer(optimizer)\n"),
        (STEP, "        lockstep.clip_grad_norm_(model.parameters(), 0.1)\n" + STEP),
    ),
    "torch's clipping": usual(
        (STEP, "        nn.utils.clip_grad_norm_(model.parameters(), 0.1)\n" + STEP),
        ("SGD(model.parameters(), lr=0.1, momentum=0.9)", "AdamW(model.parameters())"),
    ),
    "a schedule of the learning rate": usual(
        (SGD, SGD + "plan = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, 15)\n"),
        (STEP, STEP + "        plan.step()\n"),
    ),
    "a plateau of all ranks' loss": usual(
        (SGD, SGD + "plan = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)\n"),
        (STEP, STEP + '        plan.step(lockstep.reduce({"l": loss.item()}, "mean")["l"])\n'),
    ),
    "torch's averaged model": usual(
        (SGD, SGD + "average = torch.optim.swa_utils.AveragedModel(model)\n"),
        (STEP, STEP + "        average.update_parameters(model)\n"),
    ),
    "a moving average by hand": usual(
        (SGD, SGD + "average = copy.deepcopy(model).requires_grad_(False)\n"),
        (
            STEP,
            STEP + "        for own, p in zip(average.parameters(), model.parameters()):\n"
            "            own.lerp_(p.detach(), 0.1)\n",
        ),
    ),
    "distilled from a teacher": usual(
        (SGD, SGD + "teacher = net().eval().requires_grad_(False)\n"),
        (
            LOSS,
            "        with torch.no_grad():\n            wanted = teacher(x).softmax(1)\n"
            "        given = model(x).log_softmax(1)\n"
            '        loss = lockstep.mean(F.kl_div(given, wanted, reduction="none").sum(1))\n',
        ),
    ),
    "an evaluation after each step": usual(
        (
            STEP,
            STEP + "        model.eval()\n        with torch.no_grad():\n"
            "            right = sum((model(a).argmax(1) == b).sum().item() for a, b in test)\n"
            '        counts = lockstep.reduce({"right": right}, "sum")\n        model.train()\n',
        ),
        (SGD, SGD + "test = lockstep.DataLoader(Subset(data, range(31)), batch_size=10)\n"),
    ),
    "an evaluation of all samples on rank 0": usual(
        (
            STEP,
            STEP + "        if world.is_main if hasattr(world, 'is_main') else world.rank == 0:\n"
            "            with torch.no_grad():\n"
            "                [model.eval()(a) for a, b in torch.utils.data.DataLoader(data, 30)]\n"
            "        model.train()\n",
        ),
    ),
    "autocast in bfloat16": usual(
        (
            LOSS,
            '        with torch.autocast("cpu", torch.bfloat16):\n            out = model(x)\n'
            "        loss = lockstep.mean(losses_of(out.float(), y))\n",
        )
    ),
    "checkpointed activations": usual(
        (
            "model(x), y",
            "model[2](torch.utils.checkpoint.checkpoint(model[:2], x, use_reentrant=False)), y",
        ),
        (MODEL, "import torch.utils.checkpoint\n" + MODEL),
    ),
    "saved and gone on with": usual(
        (
            "for epoch in range(3)",
            'start = lockstep.load("run", epoch=0)["epoch"] if os.path.exists("run") else 0\n'
            "for epoch in range(start, 3)",
        ),
        (STEP, STEP + '        lockstep.save("run", model=model, epoch=epoch)\n'),
    ),
    "frozen, then unfrozen": usual(
        (SGD, SGD + "model[0].requires_grad_(False)\n"),
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
            LOSS,
            LOSS + "        loss = loss + 1e-3 * sum((p**2).sum() for p in model.parameters())\n",
        ),
    ),
    "a penalty of gradients": usual(
        (
            LOSS,
            "        x.requires_grad_()\n        out = model(x)\n"
            "        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)\n"
            "        loss = lockstep.mean(losses_of(out, y) + 0.1 * slope.square().sum(1))\n",
        )
    ),
    "classes of different weight": usual(
        (LOSS, "        loss = lockstep.mean(losses_of(model(x), y), weight=rare[y])\n"),
        (SGD, SGD + "rare = torch.tensor([1.0, 2.0, 5.0])\n"),
    ),
    "gradients averaged by hand": """\
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in loader_of():
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    lockstep.average_gradients(model, weight=len(x))
    optimizer.step()
""",
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
        (SGD, SGD + "torch.manual_seed(100 + world.rank)\n"),
        ("model(x)", "model(x + 0.1 * torch.randn_like(x))"),
    ),
    "layers left out at random, on all ranks alike": usual(
        ("model(x)", "(model(x) if random.random() < 0.5 else model[2](model[0](x)))"),
        (SGD, SGD + "random.seed(5)\n"),
    ),
    "a metric of a rank, printed": usual(
        (STEP, STEP + "        print((model(x).argmax(1) == y).float().mean().item())\n")
    ),
    "weights for evaluations": FREE
    + usual(
        ("torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)", "Free(model.parameters())"),
        (
            STEP,
            STEP + "        optimizer.eval()\n        with torch.no_grad():\n"
            "            model.eval()(x)\n        optimizer.train()\n        model.train()\n",
        ),
    ),
    "scaled losses": usual(
        (
            BACKWARD,
            "        scaler.scale(loss).backward()\n        scaler.unscale_(optimizer)\n"
            "        nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n",
        ),
        (STEP, "        scaler.step(optimizer)\n        scaler.update()\n"),
        (SGD, SGD + 'scaler = torch.amp.GradScaler("cpu")\n'),
    ),
    "a redundancy optimizer": usual(
        (
            "torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)",
            "lockstep.ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)",
        )
    ),
    "initial values from all ranks' first batch": usual(
        (
            SGD,
            "x, _ = next(iter(loader_of()))\ncenter = lockstep.mean(x[:, 0])\n"
            "model[0].bias.data.fill_(-center)\n" + SGD,
        ),
    ),
    "a compiled model": usual(
        ("model(x)", "fast(x)"), (SGD, SGD + 'fast = torch.compile(model, backend="eager")\n')
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
    "a loss between the samples of all ranks": """\
model = lockstep.parallelize(net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in loader_of():
    given, labels = lockstep.all_gather(model(x)), lockstep.all_gather(y)
    differ = labels[:, None] != labels[None]
    step(optimizer, (F.relu(1 - torch.cdist(given, given)) * differ).amax(1).mean())
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
