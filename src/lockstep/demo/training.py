"""The demo's training loop: the same code for any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn
from torch.nn import functional as F

from lockstep.data import batch_slice
from lockstep.demo.convnet import ConvNet
from lockstep.demo.datasets import Digits
from lockstep.nn import parallelize
from lockstep.world import World

GLOBAL_BATCH_SIZE = 128
LEARNING_RATE, MOMENTUM = 0.05, 0.9

State = dict[str, torch.Tensor]


class Trained(NamedTuple):
    """What a rank brings back: the parameters after training, and after one exact epoch more."""

    start: State
    end: State


def train(world: World, digits: Digits, epochs: int, seed: int) -> Trained:
    """Train on this rank, and then one more epoch without anything that is random.

    Rank 0 shows the progress and prints each epoch's loss and accuracy, over all ranks.
    """
    torch.manual_seed(seed)
    model = parallelize(ConvNet().to(world.device), process_group=world.process_group)
    torch.manual_seed(seed + world.rank)  # ranks drop out different units
    console = Console(quiet=world.rank != 0)
    num_steps = epochs * len(list(global_batches(digits, world.world_size, seed)))
    with _progress(console) as progress:
        bar = progress.add_task("training", total=num_steps)
        optimizer = _optimizer(model)
        for epoch in range(epochs):
            batches = global_batches(digits, world.world_size, seed + epoch)
            loss = train_epoch(
                model, optimizer, digits, world, batches, lambda: progress.advance(bar)
            )
            right = accuracy(model, digits, world)
            console.print(f"epoch {epoch + 1:2}  loss {loss:.4f}  accuracy {right:6.2%}")
    start = _copy_of(model)
    return Trained(start, train_exactly(start, digits, world, seed, world.world_size))


def train_exactly(start: State, digits: Digits, world: World, seed: int, num_ranks: int) -> State:
    """Parameters after one epoch from ``start``, in float64 and without dropout.

    On one rank as on several, with the batches that ``num_ranks`` have.
    """
    model = ConvNet(dropout=0)
    model.load_state_dict(start)
    model = parallelize(model.double().to(world.device), process_group=world.process_group)
    exact = digits._replace(train_images=digits.train_images.double())
    batches = global_batches(digits, num_ranks, seed)
    train_epoch(model, _optimizer(model), exact, world, batches)
    return _copy_of(model)


def largest_difference(one: State, other: State) -> float:
    """The largest absolute difference between two sets of parameters."""
    return max((one[name] - other[name]).abs().max().item() for name in one)


def global_batches(digits: Digits, num_ranks: int, seed: int) -> Iterator[torch.Tensor]:
    """An epoch's batches for ``num_ranks``, as indices; the same on every rank."""
    order = torch.randperm(len(digits.train_labels), generator=torch.Generator().manual_seed(seed))
    batches = order.split(GLOBAL_BATCH_SIZE)
    # A last batch too short to give each rank a sample is left out.
    return (batch for batch in batches if len(batch) >= num_ranks or len(batches) == 1)


def train_epoch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    digits: Digits,
    world: World,
    batches: Iterator[torch.Tensor],
    after_step: Callable[[], object] = lambda: None,
) -> float:
    """Take a step for each global batch, and return the mean loss over all of them."""
    model.train()
    totals = torch.zeros(2, dtype=torch.float64)
    for batch in batches:
        mine = batch[batch_slice(len(batch), world.rank, world.world_size)]
        images = digits.train_images[mine].to(world.device)
        labels = digits.train_labels[mine].to(world.device)
        optimizer.zero_grad()
        loss_sum = F.nll_loss(model(images), labels, reduction="sum")
        # Gradients become the mean over ranks. For that to be the mean over the samples of the
        # whole batch, however it was split, each rank's sum is divided by its length per rank.
        (loss_sum * world.world_size / len(batch)).backward()
        optimizer.step()
        totals += torch.tensor([loss_sum.item(), len(mine)])
        after_step()
    loss_sum, num_samples = _sum_over_ranks(totals, world)
    return float(loss_sum / num_samples)


@torch.no_grad()
def accuracy(model: nn.Module, digits: Digits, world: World) -> float:
    """The share of test images that are told right; each rank looks at every n-th."""
    model.eval()
    images = digits.test_images[world.rank :: world.world_size].to(world.device)
    labels = digits.test_labels[world.rank :: world.world_size].to(world.device)
    num_right = (model(images).argmax(1) == labels).sum().item() if len(labels) else 0
    right, total = _sum_over_ranks(torch.tensor([num_right, len(labels)]), world)
    return float(right / total)


def _sum_over_ranks(values: torch.Tensor, world: World) -> torch.Tensor:
    values = values.to(world.device)
    if world.process_group is not None:
        dist.all_reduce(values, group=world.process_group)
    return values


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)


def _copy_of(model: nn.Module) -> State:
    return {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=console.quiet,
        transient=True,
    )
