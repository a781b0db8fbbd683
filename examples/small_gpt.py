"""A small GPT in bfloat16: accumulation, clipping, warmup and cosine, an optimizer in parts.

    python examples/small_gpt.py
    lockstep run -n 2 examples/small_gpt.py

It learns to continue its own source, letter by letter. On two ranks it prints::

    36,048 parameters; this rank updates about 1/2 of them
    step  0: loss 4.8664, gradients 0.40, learning rate 0.00060
    step 10: loss 4.0304, gradients 1.30, learning rate 0.00271
    step 20: loss 3.5707, gradients 0.79, learning rate 0.00104
    step 29: loss 3.5671, gradients 0.61, learning rate 0.00001
"""

import contextlib
import math
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lockstep

LENGTH, WIDTH, NUM_LAYERS, NUM_HEADS = 32, 48, 1, 4
BATCH, NUM_MICRO_BATCHES, NUM_STEPS, NUM_WARMUP_STEPS = 32, 2, 30, 5
VOCABULARY = 128  # ASCII


class Block(nn.Module):
    """Attention to what was before, and a perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Of batch x length x width."""
        qkv = self.qkv(self.norm1(x)).unflatten(2, (3, NUM_HEADS, -1))
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Embeddings that the head shares, and blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*[Block() for _ in range(NUM_LAYERS)])
        self.norm = nn.LayerNorm(WIDTH)
        nn.init.normal_(self.letters.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """The logits of the letter after each."""
        hidden = self.letters(x) + self.places(torch.arange(x.size(1), device=x.device))
        return F.linear(self.norm(self.blocks(hidden)), self.letters.weight)


def learning_rate(step: int) -> float:
    """A factor: a warmup, then half of a cosine."""
    if step < NUM_WARMUP_STEPS:
        return (step + 1) / NUM_WARMUP_STEPS
    done = (step - NUM_WARMUP_STEPS) / (NUM_STEPS - NUM_WARMUP_STEPS)
    return 0.5 * (1 + math.cos(math.pi * done))


def main() -> None:
    """Train, and print the loss."""
    world = lockstep.init()
    lockstep.seed(0)
    text = torch.tensor([*Path(__file__).read_bytes()])
    model = lockstep.parallelize(GPT().to(world.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1, betas=(0.9, 0.95))
    optimizer = lockstep.shard_optimizer(optimizer)  # each rank updates its part
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate)

    def micro_batch() -> tuple[Tensor, Tensor]:
        """A part of the global batch, of random numbers of this rank's own."""
        starts = torch.randint(len(text) - LENGTH - 1, (BATCH // world.world_size,))
        rows = torch.stack([text[i : i + LENGTH + 1] for i in starts.tolist()]).to(world.device)
        return rows[:, :-1], rows[:, 1:]

    for step in range(NUM_STEPS):
        for number in range(NUM_MICRO_BATCHES):
            x, y = micro_batch()
            with torch.autocast(world.device.type, dtype=torch.bfloat16):
                logits = model(x)
            loss = lockstep.mean(F.cross_entropy(logits.float().mT, y, reduction="none"))
            is_last = number == NUM_MICRO_BATCHES - 1
            # No `/ NUM_MICRO_BATCHES`: the mean is over all of them.
            with contextlib.nullcontext() if is_last else lockstep.accumulate(model):
                loss.backward()
        norm = lockstep.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step == 0:
            count = sum(parameter.numel() for parameter in model.parameters())
            share = f"about 1/{world.world_size}"
            world.print(f"{count:,} parameters; this rank updates {share} of them")
        if step % 10 == 0 or step == NUM_STEPS - 1:
            rate = schedule.get_last_lr()[0]
            numbers = f"loss {loss:.4f}, gradients {norm:.2f}, learning rate {rate:.5f}"
            world.print(f"step {step:2}: {numbers}")
        schedule.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
