"""Several devices, in one process, for a part of a model; its other parts stay as they are.

    python examples/data_parallel_parts.py                   two replicas, both on the CPU
    python examples/data_parallel_parts.py cuda:0 cuda:1     one replica on each of two GPUs

In the first model, the middle block is replicated. In the second, everything but the embedding is:
that may be too large for a GPU, so it stays on the CPU, and only the looked-up vectors are
sent. Both models train as on the first device alone, but for rounding errors.
"""

import argparse

import torch
from torch import nn
from torch.nn import functional as F

import lockstep

NUM_STEPS = 100
NUM_WORDS = 50


class Sandwich(nn.Module):
    """Three layers, of which the middle one is replicated."""

    def __init__(self, devices: list[str]) -> None:
        super().__init__()
        home = devices[0]
        self.first = nn.Linear(8, 32).to(home)
        middle = nn.Sequential(nn.Tanh(), nn.Linear(32, 32), nn.Tanh()).to(home)
        self.middle = lockstep.DataParallel(middle, devices)
        self.last = nn.Linear(32, 1).to(home)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One number for each row of ``x``; ``middle`` takes and returns the whole batch."""
        return self.last(self.middle(self.first(x.to(self.first.weight.device))))


class Words(nn.Module):
    """An embedding on the CPU, and replicated layers."""

    def __init__(self, devices: list[str]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_WORDS, 32, sparse=True)
        layers = nn.Sequential(nn.Tanh(), nn.Flatten(), nn.Linear(3 * 32, 1)).to(devices[0])
        self.layers = lockstep.DataParallel(layers, devices)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """One number for each row of words; the embedding's gradients are on the CPU."""
        return self.layers(self.embedding(words))


def numbers() -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of numbers, and a target for each row."""
    x = torch.randn(257, 8)  # an odd number: one replica has a row more
    return x, x.sum(1, keepdim=True).tanh()


def sentences() -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of three words, and for each row the sum of its words' values."""
    words = torch.randint(NUM_WORDS, (257, 3))
    return words, torch.randn(NUM_WORDS)[words].sum(1, keepdim=True)


def losses_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> list[float]:
    """Train, and return the loss before each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        output = model(x)  # on the first device, wherever its rows were computed
        loss = F.mse_loss(output, y.to(output.device))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    """Train both models, on all devices and on one."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("devices", nargs="*", default=["cpu", "cpu"])
    devices = parser.parse_args().devices

    for kind, data in ((Sandwich, numbers), (Words, sentences)):
        found = []
        for used in (devices, devices[:1]):
            torch.manual_seed(1)  # the same parameters and samples both times
            found.append(losses_of(kind(used), *data()))
        replicated, alone = found
        print(
            f"{kind.__name__}: loss {replicated[0]:.4f} at first, {replicated[-1]:.4f} at last "
            f"on {', '.join(devices)}, {alone[-1]:.4f} on {devices[0]} alone",
            flush=True,
        )


if __name__ == "__main__":
    main()
