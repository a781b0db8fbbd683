"""Synchronous data-parallel SGD, by hand: a small ConvNet learns handwritten digits.

    lockstep run -n 2 examples/synchronous_sgd.py     two ranks
    python examples/synchronous_sgd.py                the same program, one rank

Every rank holds the same network and takes its share of each batch. The gradients are averaged
over the ranks before each step, so all ranks take the same step and stay the same.

(``lockstep.parallelize`` does the averaging for you, while ``backward()`` still runs. Here it is
a line of its own, so that you can see it.)
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep.data import batch_share, epoch_shares
from lockstep.demo import load

GLOBAL_BATCH_SIZE = 128  # over all ranks: training doesn't depend on their number


class ConvNet(nn.Module):
    """An ordinary network, which knows nothing of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, kernel_size=5)
        self.conv2 = nn.Conv2d(10, 20, kernel_size=5)
        self.conv2_drop = nn.Dropout2d()
        self.fc1 = nn.Linear(320, 50)
        self.fc2 = nn.Linear(50, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The log-probabilities of the ten digits for each image."""
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2_drop(self.conv2(x)), 2))
        x = F.dropout(F.relu(self.fc1(x.flatten(1))), training=self.training)
        return F.log_softmax(self.fc2(x), dim=1)


def my_loader(world: lockstep.World, seed: int) -> DataLoader:
    """This rank's part of the digits, in batches of this rank's share."""
    digits = load("digits")
    dataset = TensorDataset(digits.train_images, digits.train_labels)
    # All ranks divide the dataset in the same way, from the same seed, and each takes its own
    # part. Every rank has equally many batches: in one more, a rank would wait for gradients of
    # the others that never come.
    sizes = epoch_shares(len(dataset), GLOBAL_BATCH_SIZE, world.world_size)
    part = lockstep.partition(dataset, sizes, seed)[world.rank]
    share = batch_share(GLOBAL_BATCH_SIZE, world.rank, world.world_size)
    return DataLoader(part, batch_size=share, shuffle=True)


def mean_over_ranks(loss_sum: float, num_samples: int, world: lockstep.World) -> float:
    """The mean loss of all samples of all ranks."""
    sums = torch.tensor([loss_sum, num_samples], dtype=torch.float64, device=world.device)
    if world.process_group is not None:  # None: this rank is alone
        dist.all_reduce(sums, group=world.process_group)
    return (sums[0] / sums[1]).item()


def main() -> None:
    """Train, and print the loss of each epoch."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1234)
    args = parser.parse_args()

    world = lockstep.init()

    # The same seed on every rank: the networks start out the same, and since they take the same
    # steps, they stay the same. No parameter is ever sent.
    torch.manual_seed(args.seed)
    model = ConvNet().to(world.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)

    # From here on, each rank draws its own random numbers, for shuffling and for dropout.
    torch.manual_seed(args.seed + world.rank)
    loader = my_loader(world, args.seed)

    for epoch in range(args.epochs):
        loss_sum, num_samples = 0.0, 0
        for images, labels in loader:
            images, labels = images.to(world.device), labels.to(world.device)
            optimizer.zero_grad()
            loss = F.nll_loss(model(images), labels)
            loss.backward()
            # This rank's loss is a mean over len(images) samples. With that weight, the mean of the
            # gradients is that of the whole batch, however unevenly it was split.
            lockstep.average_gradients(model, weight=len(images))
            optimizer.step()
            loss_sum += loss.item() * len(images)
            num_samples += len(images)
        mean_loss = mean_over_ranks(loss_sum, num_samples, world)
        world.print(f"epoch {epoch}: mean loss {mean_loss:.4f}")


if __name__ == "__main__":
    main()
