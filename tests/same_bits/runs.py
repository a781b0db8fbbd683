"""Models, and runs of them in shards, whose every bit is compared."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import lockstep
from tests.ranks import run_ranks

NUM_CLASSES = 5
_CPU = torch.device("cpu")


class Counting(nn.Module):
    """Scales by a running statistic, in a buffer that each forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.ones(()))
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Features, as many as before."""
        if self.training:
            self.largest.mul_(0.9).add_(0.1 * x.detach().abs().max())
            self.num_calls.add_(1)
        return x / self.largest


class ConvNet(nn.Module):
    """With BatchNorm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.drop = nn.Dropout(0.3)
        self.linear = nn.Linear(8 * 4 * 4, NUM_CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits of images of 6 x 6."""
        x = F.relu(self.norm(self.conv(x.view(-1, 3, 6, 6))))
        logits: torch.Tensor = self.linear(self.drop(x).flatten(1))
        return logits


class PartlyUsed(nn.Module):
    """An MLP with a layer that no sample uses, and one that some batches use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.unused = nn.Linear(108, 16), nn.Linear(16, 16)
        self.sometimes, self.last = nn.Linear(16, 16), nn.Linear(16, NUM_CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits."""
        x = F.relu(self.first(x))
        if x.mean() > 0.4:
            x = self.sometimes(x)
        logits: torch.Tensor = self.last(x)
        return logits


class Transformer(nn.Module):
    """One layer with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(12, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.last = nn.Linear(16, NUM_CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits of sequences of 9."""
        logits: torch.Tensor = self.last(self.layer(self.embed(x.view(-1, 9, 12))).mean(1))
        return logits


MODELS: Mapping[str, type[nn.Module]] = {
    "convnet": ConvNet,
    "partly used": PartlyUsed,
    "transformer": Transformer,
}
Optimizers = Callable[[nn.Module], torch.optim.Optimizer]
OPTIMIZERS: Mapping[str, Optimizers] = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
    "AdamW under autocast": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
}


@functools.cache  # made by one thread: all have one generator
def model_of(kind: str) -> nn.Module:
    """A model of one of ``MODELS``, the same every time."""
    with torch.random.fork_rng(devices=[]):
        torch.random.manual_seed(1)
        return MODELS[kind]()


def batch_of(step: int, size: int = 30) -> tuple[torch.Tensor, torch.Tensor]:
    """The global batch of a step: features and classes."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(size, 108, generator=generator)
    return x, torch.randint(0, NUM_CLASSES, (size,), generator=generator)


class Run:
    """A run of some steps on one rank, and what it leaves.

    Args:
        model: Is copied.
        make_optimizer: Makes the optimizer.
        group: The ranks; None for one alone.
        num_shards: The number of shards.
        device: Where it computes.
        options: Of ``parallelize()``.
    """

    def __init__(
        self,
        model: nn.Module,
        make_optimizer: Optimizers,
        group: dist.ProcessGroup | None = None,
        num_shards: int = 8,
        *,
        device: torch.device = _CPU,
        **options: Any,
    ) -> None:
        copied, self.device = copy.deepcopy(model).to(device), device
        self.model = lockstep.parallelize(copied, process_group=group, **options)
        self.optimizer = make_optimizer(self.model)
        self.num_shards, self.numbers = num_shards, list[float | None]()

    def steps(self, steps: Sequence[int], *, size: int = 30, autocast: bool = False) -> None:
        """Take these steps, and note the losses and norms."""
        for number in steps:
            batch = [each.to(self.device) for each in batch_of(number, size)]
            step = lockstep.shards(self.model, batch, self.num_shards, step=number)
            for x, y in step:
                with torch.autocast(self.device.type, torch.bfloat16, enabled=autocast):
                    losses = F.cross_entropy(self.model(x), y, reduction="none")
                lockstep.mean(losses).backward()
            norm = lockstep.clip_grad_norm_(self.model.parameters(), 1.0)
            self.numbers += [step.loss, norm.item()]
            self.optimizer.step()
            self.optimizer.zero_grad()

    def bits(self) -> dict[str, Any]:
        """Every number that the run has left, as bytes."""
        state = {name: each.clone().cpu() for name, each in self.model.state_dict().items()}
        found: dict[str, Any] = {name: each.numpy().tobytes() for name, each in state.items()}
        return found | {"numbers": self.numbers}


def differing(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """The names of what differs in any bit."""
    return [name for name in mine | theirs if mine.get(name) != theirs.get(name)]


def bits_on(
    num_ranks: int, backend: str, body: Callable[[dist.ProcessGroup | None], Run]
) -> list[dict[str, Any]]:
    """What ``body`` leaves on each rank, of one alone in this thread."""
    if num_ranks == 1:
        return [body(None).bits()]
    return run_ranks(num_ranks, lambda _, group: body(group).bits(), backend=backend)


@contextmanager
def one_thread() -> Iterator[None]:
    """Put the number of threads back that ``shards()`` sets."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)
        assert threading.current_thread() is threading.main_thread()
