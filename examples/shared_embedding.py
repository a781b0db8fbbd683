"""One embedding that two parts of a model share: of its gradient, only the rows in use travel.

    lockstep run -n 2 examples/shared_embedding.py     two ranks
    python examples/shared_embedding.py                the same program, one rank

A model reads what a user has bought, and scores what may come next; both look up the same table.
The program prints which rows each rank looks up, how much of the gradients it sends, and how far
the table ends from that of a model that one process trains on all samples.
"""

import copy

import torch
from torch import nn
from torch.nn import functional as F

import lockstep
from lockstep.data import batch_slice

NUM_ITEMS, WIDTH = 50_000, 32
NUM_STEPS, NUM_BATCHES, BATCH_SIZE, NUM_BOUGHT = 20, 4, 48, 10


class Recommender(nn.Module):
    """Scores an item by a user's history. One weight is the table of both lookups."""

    def __init__(self) -> None:
        super().__init__()
        self.history = nn.EmbeddingBag(NUM_ITEMS, WIDTH, mode="mean", dtype=torch.float64)
        self.item = nn.Embedding(NUM_ITEMS, WIDTH, _weight=self.history.weight)
        self.item.weight = self.history.weight
        self.user = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, bought: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        """Logits of shape (batch,), for histories of shape (batch, num_bought)."""
        return (self.user(self.history(bought)) * self.item(item)).sum(1)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Histories, items and whether they were bought next, the same on every rank."""
    generator = torch.Generator().manual_seed(step % NUM_BATCHES)
    # Some items are bought often, most hardly ever.
    items = (NUM_ITEMS * torch.rand(BATCH_SIZE, NUM_BOUGHT + 1, generator=generator) ** 3).long()
    is_next = torch.rand(BATCH_SIZE, generator=generator, dtype=torch.float64).round()
    return items[:, :-1], items[:, -1], is_next


def train(model: nn.Module, part: slice, num_ranks: int) -> list[str]:
    """Train on a part of each batch; return what there is to tell of the steps."""
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    told = []
    for step in range(NUM_STEPS):
        bought, item, is_next = (each[part] for each in batch(step))
        losses = F.binary_cross_entropy_with_logits(model(bought, item), is_next, reduction="none")
        loss = losses.sum() * num_ranks / BATCH_SIZE  # whose mean over the ranks is that of all
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        rows = torch.cat([bought.flatten(), item]).unique()
        first = ", ".join(str(row) for row in rows[:4].tolist())
        told.append(f"step {step}: loss {loss:.4f}, {rows.numel()} rows: {first}, ...")
    return told


def main() -> None:
    """Train on all ranks, then on this one alone, and compare."""
    world = lockstep.init(device="cpu")
    lockstep.seed(0)
    alone = Recommender()
    model = lockstep.parallelize(copy.deepcopy(alone))
    part = batch_slice(BATCH_SIZE, world.rank, world.world_size)
    told = train(model, part, world.world_size)
    for line in told[::NUM_BATCHES]:
        print(line, flush=True)

    table = model.item.weight
    gradients = sum(parameter.nbytes for parameter in model.parameters())
    sent = lockstep.explain(model).to_dict()["bytes_per_step"]["gradients"]
    world.print(f"{gradients / 1e6:.1f} MB of gradients, of which a rank sends {sent / 1e6:.2f} MB")

    train(alone, slice(None), 1)
    difference = (table - alone.item.weight).abs().max().item()
    world.print(f"largest difference to the table of one process: {difference:.0e}")


if __name__ == "__main__":
    main()
