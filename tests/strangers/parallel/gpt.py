"""A small GPT learns to count: random batches from one long tensor, accumulation, clipping."""

import math
from contextlib import nullcontext

import torch
from torch import nn
from torch.nn import functional as F

import lockstep

LENGTH, BATCH, ACCUMULATE, STEPS = 32, 8, 4, 12
world = lockstep.init()
torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
autocast = torch.autocast("cuda", torch.bfloat16) if device == "cuda" else nullcontext()
data = torch.arange(5000) % 61
batches = torch.Generator().manual_seed(1)


def get_batch():
    starts = torch.randint(len(data) - LENGTH, (BATCH,), generator=batches)
    starts = starts[world.rank :: world.world_size]
    x = torch.stack([data[start : start + LENGTH] for start in starts])
    y = torch.stack([data[start + 1 : start + LENGTH + 1] for start in starts])
    return x.to(device), y.to(device)


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        q, k, v = (t.unflatten(2, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, dim=64, num_layers=2):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(61, dim), nn.Embedding(LENGTH, dim)
        self.blocks = nn.Sequential(*[Block(dim, 4) for _ in range(num_layers)])
        self.head = nn.Linear(dim, 61, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.head.weight = self.tokens.weight  # shared

    def forward(self, x):
        x = self.tokens(x) + self.positions(torch.arange(x.size(1), device=x.device))
        return self.head(self.blocks(x))


model = lockstep.parallelize(GPT().to(device))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.LambdaLR(
    optimizer, lambda step: min(1, (step + 1) / 4) * (1 + math.cos(math.pi * step / STEPS)) / 2
)
for step in range(STEPS):
    for micro in range(ACCUMULATE):
        if micro == 0:
            optimizer.zero_grad()
        x, y = get_batch()
        with autocast:
            logits = model(x)
            loss = lockstep.mean(F.cross_entropy(logits.mT, y, reduction="none"))
        with nullcontext() if micro == ACCUMULATE - 1 else lockstep.accumulate(model):
            loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    world.print(f"step {step}: loss {loss.item():.6f} norm {norm.item():.6f}")
