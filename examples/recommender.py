"""A recommender: bags of what users liked, tables with sparse gradients, and the AUC of all ranks.

    python examples/recommender.py
    lockstep run -n 2 examples/recommender.py

Ranks send each other the rows of the tables that they have used, and no others. On any number of
ranks it prints::

    epoch 0: loss 0.7020, AUC 0.535
    epoch 1: loss 0.6659, AUC 0.580
    epoch 2: loss 0.4643, AUC 0.641
    epoch 3: loss 0.2530, AUC 0.711
"""

import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch.nn import functional as F

import lockstep

NUM_ITEMS, WIDTH, NUM_EPOCHS = 200, 16, 4

Sample = tuple[Tensor, Tensor, float]


def clicks(count: int) -> list[Sample]:
    """What a user has liked, an item, and whether it was clicked: if it is like most of those."""
    taste = torch.randn(NUM_ITEMS, 3)
    samples = []
    for _ in range(count):
        user = torch.randn(3)
        liked = (taste @ user + torch.randn(NUM_ITEMS)).topk(int(torch.randint(4, 20, ()))).indices
        item = torch.randint(NUM_ITEMS, ())
        samples.append((liked, item, float(taste[item] @ user > 0)))
    return samples


def collate(batch: list[Sample]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Bags of different sizes one after the other, and where each begins."""
    sizes = torch.tensor([len(liked) for liked, _, _ in batch])
    bags = torch.cat([liked for liked, _, _ in batch])
    items = torch.stack([item for _, item, _ in batch])
    return bags, sizes.cumsum(0) - sizes, items, torch.tensor([click for _, _, click in batch])


class Recommender(nn.Module):
    """A table for what was liked, one for what is offered, and layers above."""

    def __init__(self) -> None:
        super().__init__()
        self.liked = nn.EmbeddingBag(NUM_ITEMS, WIDTH, mode="mean", sparse=True)
        self.items = nn.Embedding(NUM_ITEMS, WIDTH, sparse=True)
        self.top = nn.Sequential(nn.Linear(3 * WIDTH, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, bags: Tensor, offsets: Tensor, items: Tensor) -> Tensor:
        """The logit of a click for each user and item."""
        user, item = self.liked(bags, offsets), self.items(items)
        return self.top(torch.cat([user, item, user * item], 1)).squeeze(1)


def main() -> None:
    """Train, and print the AUC after each epoch."""
    world = lockstep.init()
    lockstep.seed(0)
    samples = clicks(2400)
    model = lockstep.parallelize(Recommender().to(world.device))
    tables = torch.optim.SparseAdam([model.liked.weight, model.items.weight], lr=0.03)
    layers = torch.optim.Adam(model.top.parameters(), lr=0.01)
    train = lockstep.DataLoader(samples[:2000], batch_size=100, shuffle=True, collate_fn=collate)
    test = lockstep.DataLoader(samples[2000:], batch_size=200, collate_fn=collate)

    for epoch in range(NUM_EPOCHS):
        for batch in train:
            *inputs, clicked = (tensor.to(world.device) for tensor in batch)
            logits = model(*inputs)
            losses = F.binary_cross_entropy_with_logits(logits, clicked, reduction="none")
            loss = lockstep.mean(losses)
            loss.backward()
            for optimizer in (tables, layers):
                optimizer.step()
                optimizer.zero_grad()

        scores, labels = [], []
        with torch.no_grad():
            for batch in test:
                *inputs, clicked = (tensor.to(world.device) for tensor in batch)
                scores.append(model(*inputs))
                labels.append(clicked)
        # An AUC isn't a mean of the ranks' AUCs: it takes all scores.
        score, label = lockstep.reduce((torch.cat(scores), torch.cat(labels)), "cat")
        auc = roc_auc_score(label.cpu().numpy(), score.cpu().numpy())
        world.print(f"epoch {epoch}: loss {loss:.4f}, AUC {auc:.3f}")


if __name__ == "__main__":
    main()
