"""Programs with a mistake in each, and words of the cause that a check may name."""

from __future__ import annotations

from tests.check.planted_samples import SAMPLES
from tests.check.programs import (
    BACKWARD,
    BEGIN,
    EVEN,
    FREE,
    LOSS,
    MODEL,
    OPTIONS,
    SGD,
    STEP,
    Planted,
    usual,
)

MISTAKES: dict[str, Planted] = {
    **SAMPLES,
    "torch's mean of means": Planted(
        usual((LOSS, "        loss = F.cross_entropy(model(x), y)\n")),
        "mean of means: cross_entropy",
    ),
    "losses that are averaged": Planted(
        usual((LOSS, "        loss = losses_of(model(x), y).mean()\n")), "mean of means: mean"
    ),
    "a sum by the number of a rank's samples": Planted(
        usual((LOSS, "        loss = losses_of(model(x), y).sum() / len(x)\n")),
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
        usual((LOSS, "        loss = losses_of(model(x), y).sum()\n"), ("0.1,", "0.001,")),
        "adds up each rank's own samples",
    ),
    "the sum for the mean, with Adam": Planted(
        usual(
            (LOSS, "        loss = losses_of(model(x), y).sum()\n"),
            (OPTIONS, "Adam(model.parameters(), lr=0.01, eps=1e-2)"),
        ),
        "adds up each rank's own samples",
    ),
    "times the number of ranks": Planted(
        usual((LOSS, LOSS + "        loss = loss * world.world_size\n")), "number of ranks"
    ),
    "by the number of ranks": Planted(
        usual((BACKWARD, "        (loss / world.world_size).backward()\n")), "number of ranks"
    ),
    "a penalty times the number of ranks": Planted(
        usual(
            (
                LOSS,
                LOSS + "        loss = loss + 0.01 * world.world_size * sum("
                "p.square().sum() for p in model.parameters())\n",
            )
        ),
        "number of ranks",
    ),
    "a penalty on rank 0": Planted(
        usual(
            (
                LOSS,
                LOSS + "        if world.rank == 0 and world.world_size > 1:\n"
                "            loss = loss + 0.1 * model[0].weight.square().sum()\n",
            )
        ),
        None,
    ),
    "BatchNorm": Planted(
        usual((MODEL, MODEL.replace("net()", "net(nn.BatchNorm1d(8))"))), "BatchNorm"
    ),
    "BatchNorm in torch's DDP": Planted(
        usual(
            (MODEL, "model = nn.parallel.DistributedDataParallel(net(nn.BatchNorm1d(8)))\n"),
            (LOSS, "        loss = F.cross_entropy(model(x), y)\n"),
            EVEN,
        ).replace(
            "model = nn",
            "if not dist.is_initialized():\n    dist.init_process_group("
            '"gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)\nmodel = nn',
        ),
        "BatchNorm",
    ),
    "clipped by each rank": Planted(
        usual(
            (
                BACKWARD,
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
                STEP,
                "        nn.utils.clip_grad_norm_(model.parameters(), 0.001 * x.norm())\n" + STEP,
            )
        ),
        "clip_grad_norm_ (train.py",
    ),
    "a step under no_sync": Planted(
        usual((BACKWARD, "        with lockstep.no_sync(model):\n            loss.backward()\n")),
        "no_sync (train.py",
    ),
    "no parallel model": Planted(usual((MODEL, "model = net()\n")), "the model isn't parallel"),
    "a part outside of the model": Planted(
        usual((MODEL, "model = net()\nlockstep.parallelize(model[0])\n")),
        "outside of the parallel model",
    ),
    "a parameter of the loss": Planted(
        usual(
            (MODEL, MODEL + "scale = nn.Parameter(torch.ones(()))\n"),
            (OPTIONS, "SGD([*model.parameters(), scale], lr=0.1)"),
            ("model(x)", "scale * model(x)"),
        ),
        "outside of the parallel model",
    ),
    "seeds of each rank, and nothing parallel at first": Planted(
        usual(
            (
                MODEL,
                "torch.manual_seed(world.rank)\nmodel = net()\n",
            ),
            (BACKWARD, BACKWARD + "        lockstep.average_gradients(model, weight=len(x))\n"),
            ("lockstep.mean(losses_of(model(x), y))", "F.cross_entropy(model(x), y)"),
        ),
        "start from different parameters",
    ),
    "a fixed projection of each rank": Planted(
        usual(
            (MODEL, MODEL + "torch.manual_seed(world.rank)\nmix = torch.randn(6, 6)\n"),
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
                SGD,
                SGD + "plan = torch.optim.lr_scheduler.ReduceLROnPlateau("
                "optimizer, patience=0, threshold=0.0)\n",
            ),
            (STEP, STEP + "        plan.step(losses_of(model(x), y).mean().item())\n"),
        ),
        "lr is",
    ),
    "steps left out": Planted(
        usual((STEP, "        if world.rank == 0:\n            optimizer.step()\n")),
        "leaves out steps",
    ),
    "parameters changed by one rank": Planted(
        usual(
            (
                STEP,
                STEP + "        if world.rank == 1:\n            with torch.no_grad():\n"
                "                model[0].bias.clamp_(-0.01, 0.01)\n",
            )
        ),
        "changed between two steps",
    ),
    "other parameters by rank": Planted(
        usual(("model.parameters()", "[*model.parameters()][world.rank :]")), None
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
        usual((STEP, STEP + "        print((model(x).argmax(1) == y).float().mean().item())\n")),
        None,
        0,
    ),
    "an average of the weights on one rank": Planted(
        usual(
            (SGD, SGD + "average = copy.deepcopy(model)\n"),
            (
                STEP,
                STEP + "        if world.rank == 0:\n"
                "            for own, p in zip(average.parameters(), model.parameters()):\n"
                "                own.data.lerp_(p.data, 0.1)\n",
            ),
        ),
        None,
    ),
    "weights that one rank evaluates": Planted(
        usual(
            (
                STEP,
                STEP + "        kept = [p.detach().clone() for p in model.parameters()]\n"
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
            (f"torch.optim.{OPTIONS}", "Free(model.parameters())"),
            (
                STEP,
                STEP + "        with torch.no_grad():\n            model.eval()(x)\n"
                "        model.train()\n",
            ),
        ),
        "its eval() isn't called",
    ),
    "initial values from rank 0's first batch": Planted(
        usual(
            (
                MODEL,
                "x, _ = next(iter(loader_of()))\nmodel = net()\n"
                "model[0].bias.data.fill_(-x[:, 0].mean())\nlockstep.parallelize(model)\n",
            )
        ),
        "initial values depend on a rank's own samples",
    ),
    "gradients that are added up by hand": Planted(
        usual(
            (MODEL, "model = net()\n"),
            (
                BACKWARD,
                BACKWARD + "        for p in model.parameters():\n"
                "            if world.world_size > 1:\n                dist.all_reduce(p.grad)\n",
            ),
            (LOSS, "        loss = F.cross_entropy(model(x), y)\n"),
            EVEN,
        ),
        None,
    ),
    "steps that a rank's own loss leaves out": Planted(
        usual(
            (
                STEP,
                "        if losses_of(model(x), y).mean() < 1.1:\n            optimizer.step()\n",
            )
        ),
        "leaves out steps",
    ),
    "a state of the optimizer on one rank": Planted(
        usual(
            (
                SGD,
                SGD + "if world.rank == 1:\n    for p in model.parameters():\n"
                '        optimizer.state[p]["momentum_buffer"] = torch.ones_like(p)\n',
            )
        ),
        None,
    ),
    "two mistakes": Planted(
        usual(
            (MODEL, MODEL.replace("net()", "net(nn.BatchNorm1d(8))")),
            (LOSS, "        loss = F.cross_entropy(model(x), y)\n"),
        ),
        "BatchNorm",
    ),
}


def programs() -> dict[str, tuple[str, Planted]]:
    """All of them, by name."""
    return {name: (BEGIN + each.body, each) for name, each in MISTAKES.items()}
