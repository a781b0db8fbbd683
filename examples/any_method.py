"""The loss of a parallel model may come from any of its methods, not only from ``forward``.

    lockstep run -n 2 examples/any_method.py     two ranks
    python examples/any_method.py                the same program, one rank

The first layer learns to give the sums of pairs, through ``model.middle(x)``; ``forward`` is
never called, and the second layer, which no rank uses, stays as it is.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import lockstep
from lockstep.data import batch_slice

NUM_STEPS = 100


class Net(nn.Module):
    """Two layers, and a method that stops between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 4)
        self.second = nn.Linear(4, 1)

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        """The output of the first layer."""
        return self.first(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The output of both layers."""
        return self.second(F.relu(self.middle(x)))


def same_on_all_ranks(model: nn.Module, world: lockstep.World) -> bool:
    """Whether all ranks hold the same parameters, to the last bit."""
    if world.process_group is None:  # this rank is alone
        return True
    mine = nn.utils.parameters_to_vector(model.parameters()).detach()
    theirs = [torch.empty_like(mine) for _ in range(world.world_size)]
    dist.all_gather(theirs, mine, group=world.process_group)
    return all(torch.equal(mine, parameters) for parameters in theirs)


def main() -> None:
    """Train through ``middle``, and compare the ranks."""
    world = lockstep.init()

    # It is still a Net, with all its methods and attributes. All ranks start from rank 0's
    # parameters, so no seed is needed here.
    model = lockstep.parallelize(Net().to(world.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    # The same samples on every rank, of which each takes its part.
    samples = torch.randn(120, 8, generator=torch.Generator().manual_seed(0))
    x = samples[batch_slice(120, world.rank, world.world_size)].to(world.device)
    y = x[:, 0::2] + x[:, 1::2]

    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        loss = F.mse_loss(model.middle(x), y)
        loss.backward()  # .grad becomes the mean over all ranks
        optimizer.step()
        if step % 20 == 0:
            world.print(f"step {step}: loss {loss.item():.6f} on rank 0")

    if not same_on_all_ranks(model, world):
        raise SystemExit(f"rank {world.rank}: the ranks hold different parameters")
    world.print(f"ranks: {world.world_size}; all of them hold the same parameters")


if __name__ == "__main__":
    main()
