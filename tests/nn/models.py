"""Models to compare one process with many, each awkward in its own way.

None couples the samples of a batch, as BatchNorm would: then the mean over parts is the mean.
"""

from __future__ import annotations

import io
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class Refusing(torch.autograd.Function):
    """Fails in the backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ArithmeticError("refused")


class Digits(nn.Module):
    """The classic ConvNet, without dropout."""

    sample = (1, 28, 28)

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, 5)
        self.conv2 = nn.Conv2d(10, 20, 5)
        self.fc1 = nn.Linear(320, 50)
        self.fc2 = nn.Linear(50, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2(x), 2))
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


class Layers(nn.Module):
    """Thirty small layers, in several buckets when the cap is small."""

    sample = (16,)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(30))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


class Wide(nn.Module):
    """Gradients large enough to be dealt with one by one."""

    sample = (160,)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(160, 160, bias=False), nn.Tanh(), nn.Linear(160, 160, bias=False)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Shared(nn.Module):
    """One weight used three times, twice under another name."""

    sample = (8,)

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.again = self.inner
        self.out = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.again(torch.tanh(self.inner(torch.tanh(self.inner(x))))))


class Unused(nn.Module):
    """A branch that is never used, and a frozen one."""

    sample = (8,)

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.never = nn.Linear(8, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.last = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.frozen(torch.tanh(self.first(x))))


class Checkpointed(nn.Module):
    """Reentrant checkpoints, one weight in two of them, around everything but the head."""

    sample = (8,)

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.block = nn.Linear(8, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        for layer in (self.inner, self.block, self.inner):
            x = torch.tanh(checkpoint(layer, x, use_reentrant=True, preserve_rng_state=False))
        return self.head(x)


class Odd(nn.Module):
    """A number, an empty tensor, channels last, complex numbers, and another dtype."""

    sample = (2, 6, 6)

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last)
        self.factor = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.phase = nn.Parameter(torch.randn(4, dtype=torch.complex128))
        self.single = nn.Linear(4, 3, dtype=torch.float32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = (self.conv(x) * self.factor).mean((2, 3)) + self.empty.sum()
        x = (x * self.phase).real
        # Detached: what float32 rounds off must not reach the gradients of the others.
        return torch.cat((x, self.single(x.detach().float()).double()), dim=1)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "digits": Digits,
    "layers": Layers,
    "wide": Wide,
    "shared": Shared,
    "unused": Unused,
    "checkpointed": Checkpointed,
    "odd": Odd,
}


def build(name: str) -> nn.Module:
    """The model of that name in float64, the same one every time."""
    torch.manual_seed(7)
    torch.set_default_dtype(torch.float64)
    try:
        return MODELS[name]()
    finally:
        torch.set_default_dtype(torch.float32)


class Strided(nn.Module):
    """Parameters of several memory orders, which are cut in all dimensions, and a number."""

    sample = (3, 5, 5)

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, (3, 2)).to(memory_format=torch.channels_last)
        self.last = nn.Linear(192, 3)
        self.last.weight.data = self.last.weight.data.t().contiguous().t()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).flatten(1)) * self.scale


class Empty(Strided):
    """One parameter has no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.none = nn.Parameter(torch.empty(0, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.none.sum()


def saved_and_loaded(model: nn.Module) -> nn.Module:
    """What is loaded from a file to which torch has saved ``model``."""
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)
