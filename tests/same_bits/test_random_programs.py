"""Random models, optimizers, batches and ways to train: the bits of one process on any ranks."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import lockstep
from tests.counts import num_examples
from tests.same_bits.runs import NUM_CLASSES, Counting, Run, batch_of, bits_on, differing

WIDTH, NUM_STEPS = 12, 4
ACTIVATIONS = [nn.ReLU, nn.Tanh, nn.GELU, nn.Sigmoid]
OPTIMIZERS: list[Callable[[nn.Module], torch.optim.Optimizer]] = [
    lambda model: torch.optim.SGD(model.parameters(), 0.1),
    lambda model: torch.optim.SGD(model.parameters(), 0.05, 0.9, weight_decay=1e-2, nesterov=True),
    lambda model: torch.optim.AdamW(model.parameters(), 1e-2, amsgrad=True),
    lambda model: torch.optim.Adagrad(model.parameters(), 1e-2),
    lambda model: torch.optim.RMSprop(model.parameters(), 1e-3),
]


class Residual(nn.Module):
    """Adds what its layers make of a part of the features to them, if there is enough of it."""

    def __init__(self, layers: nn.Module, least: float) -> None:
        super().__init__()
        self.layers, self.least = layers, least

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Features, as many as before."""
        return x if x.abs().mean() < self.least else x + self.layers(x)


def random_layer(rng: random.Random, depth: int = 0) -> nn.Module:
    kind = rng.choice(["linear", "norm", "layer norm", "dropout", "residual", "buffers", "unused"])
    if kind == "norm":
        return nn.BatchNorm1d(WIDTH)
    if kind == "layer norm":
        return nn.LayerNorm(WIDTH)
    if kind == "dropout":
        return rng.choice([nn.Dropout, nn.AlphaDropout])(rng.uniform(0.1, 0.5))
    if kind == "residual" and depth < 2:
        layers = [random_layer(rng, depth + 1) for _ in range(rng.randint(1, 2))]
        return Residual(nn.Sequential(*layers), rng.choice([0.0, 0.5]))
    if kind == "buffers":
        return Counting()
    if kind == "unused":
        return Residual(nn.Linear(WIDTH, WIDTH), 1e9)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), rng.choice(ACTIVATIONS)())


def random_model(rng: random.Random) -> nn.Module:
    """A model that begins with the same numbers for the same ``rng``."""
    shared = nn.Linear(WIDTH, WIDTH)
    layers = [random_layer(rng) for _ in range(rng.randint(1, 5))]
    if rng.random() < 0.4:
        layers = [shared, *layers, shared]
    model = nn.Sequential(nn.Linear(108, WIDTH), *layers, nn.Linear(WIDTH, NUM_CLASSES))
    numbers = torch.Generator().manual_seed(rng.randrange(1000))
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -0.4, 0.4, generator=numbers)
    if rng.random() < 0.3:
        model[0].bias.requires_grad_(False)
    return model


class RandomRun(Run):
    """Takes steps as a random program does."""

    def take(self, how: dict[str, Any]) -> None:
        """Take all steps."""
        for number in range(NUM_STEPS):
            batch = batch_of(number, how["sizes"][number])
            step = lockstep.shards(self.model, batch, self.num_shards, step=number)
            for x, y in step:
                with torch.autocast("cpu", torch.bfloat16, enabled=how["autocast"]):
                    for _ in range(how["num_passes"]):
                        noise = how["noise"] * torch.randn(x.shape)
                        losses = F.cross_entropy(self.model(x + noise), y, reduction="none")
                        lockstep.mean(losses, weight=how["weight"] and len(x)).backward()
            self.numbers.append(step.loss)
            if how["clips"]:
                norm = lockstep.clip_grad_norm_(self.model.parameters(), 0.5)
                self.numbers.append(norm.item())
            self.optimizer.step()
            self.optimizer.zero_grad()


def program_of(seed: int) -> tuple[Callable[[dist.ProcessGroup | None], Run], int, int, str]:
    """A random program: what makes a run of it, and the shards, ranks and group to try."""
    rng = random.Random(seed)
    num_shards = rng.randint(2, 12)
    num_ranks = rng.randint(2, min(4, num_shards))
    backend = rng.choice(["threads", "shm", "gloo"])
    make_optimizer = rng.choice(OPTIMIZERS)
    policy = rng.choice(["rank0", "mean"])
    bucket_cap_mb = rng.choice([0.0005, 0.002, 25])
    how = {
        "sizes": [rng.randint(2 * num_shards, 60) for _ in range(NUM_STEPS)],
        "autocast": rng.random() < 0.3,
        "num_passes": rng.choice([1, 1, 2]),
        "noise": rng.choice([0.0, 0.1]),
        "weight": rng.choice([None, True]),
        "clips": rng.random() < 0.5,
    }
    model = random_model(rng)
    shards = rng.random() < 0.3

    def run(group: dist.ProcessGroup | None) -> Run:
        made = RandomRun(
            model,
            make_optimizer,
            group,
            num_shards,
            bucket_cap_mb=bucket_cap_mb,
            broadcast_buffers={"*": policy},
        )
        if shards and group is not None:
            lockstep.shard_optimizer(made.optimizer)
        made.take(how)
        return made

    return run, num_shards, num_ranks, backend


@pytest.mark.shortened
@pytest.mark.parametrize("seed", range(num_examples(240, 16)))
def test_random_programs_end_with_the_bits_of_one_process(seed: int) -> None:
    run, num_shards, num_ranks, backend = program_of(seed)
    (alone,) = bits_on(1, "", run)
    for rank, bits in enumerate(bits_on(num_ranks, backend, run)):
        assert not differing(bits, alone), (rank, num_shards, num_ranks, backend)
