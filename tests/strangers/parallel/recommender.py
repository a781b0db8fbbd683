"""A recommender: bags of what users liked, in sparse tables, and the AUC of what they click."""

import torch
from sklearn.metrics import roc_auc_score
from torch import nn
from torch.nn import functional as F

import lockstep

world = lockstep.init()
torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
NUM_ITEMS, DIM = 100, 16

taste = torch.randn(NUM_ITEMS, 4)
samples = []
for _ in range(2200):
    liked = torch.randint(NUM_ITEMS, (int(torch.randint(3, 20, ())),))
    item = torch.randint(NUM_ITEMS, ())
    samples.append((liked, item, float(taste[liked].mean(0) @ taste[item] > 0)))


def collate(batch):
    lengths = torch.tensor([len(liked) for liked, _, _ in batch])
    bags = torch.cat([liked for liked, _, _ in batch])
    items = torch.stack([item for _, item, _ in batch])
    clicks = torch.tensor([click for _, _, click in batch])
    return bags, lengths.cumsum(0) - lengths, items, clicks


class Recommender(nn.Module):
    def __init__(self):
        super().__init__()
        self.users = nn.EmbeddingBag(NUM_ITEMS, DIM, mode="mean", sparse=True)
        self.items = nn.Embedding(NUM_ITEMS, DIM, sparse=True)
        self.top = nn.Sequential(nn.Linear(2 * DIM, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, bags, offsets, items):
        user, item = self.users(bags, offsets), self.items(items)
        return self.top(torch.cat([user * item, user + item], 1)).squeeze(1)


model = lockstep.parallelize(Recommender().to(device))
sparse = torch.optim.SparseAdam([model.users.weight, model.items.weight], lr=0.05)
dense = torch.optim.Adam(model.top.parameters(), lr=0.01)
train_set, valid_set = samples[:2000], samples[2000:]
train_loader = lockstep.DataLoader(train_set, 100, shuffle=True, collate_fn=collate)
valid_loader = lockstep.DataLoader(valid_set, 100, collate_fn=collate)

for epoch in range(3):
    for batch in train_loader:
        bags, offsets, items, clicks = (tensor.to(device) for tensor in batch)
        logits = model(bags, offsets, items)
        loss = lockstep.mean(F.binary_cross_entropy_with_logits(logits, clicks, reduction="none"))
        sparse.zero_grad()
        dense.zero_grad()
        loss.backward()
        sparse.step()
        dense.step()

    scores, truths = [], []
    with torch.no_grad():
        for bags, offsets, items, clicks in valid_loader:
            scores.append(model(bags.to(device), offsets.to(device), items.to(device)).cpu())
            truths.append(clicks)
    scores, truths = lockstep.reduce((torch.cat(scores), torch.cat(truths)), "cat")
    auc = roc_auc_score(truths.numpy(), scores.numpy())
    world.print(f"epoch {epoch}: loss {loss.item():.6f} auc {auc:.6f}")
