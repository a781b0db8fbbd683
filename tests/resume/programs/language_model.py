"""A language model on random pieces of a text in memory, with micro-batches inside a step."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

import lockstep
from tests.resume.programs import ends

BLOCK, BATCH, WIDTH, VOCABULARY, STEPS, MICRO = 16, 4, 32, 50, 24, 2


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(BLOCK, WIDTH)
        self.block = nn.TransformerEncoderLayer(WIDTH, 2, 64, dropout=0.2, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.token.weight  # tied

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.token(x) + self.place(torch.arange(x.shape[1]))
        mask = nn.Transformer.generate_square_subsequent_mask(BLOCK)
        found: torch.Tensor = self.head(self.block(x, src_mask=mask, is_causal=True))
        return found


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def main() -> None:
    lockstep.init()
    torch.manual_seed(1337)
    text = torch.randint(VOCABULARY, (3000,))

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        starts = torch.randint(len(text) - BLOCK - 1, (BATCH,))
        x = torch.stack([text[i : i + BLOCK] for i in starts])
        return x, torch.stack([text[i + 1 : i + BLOCK + 1] for i in starts])

    model = lockstep.parallelize(Model())
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), fused=False)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=5)  # it overflows
    losses = torch.zeros(STEPS)  # of evaluations

    @torch.no_grad()
    def evaluate() -> float:
        model.eval()
        loss = sum(float(loss_of(model, *batch())) for _ in range(2))
        model.train()
        return lockstep.reduce(loss / 2)

    for step in lockstep.steps(
        STEPS, snapshot_every=1, model=model, optimizer=optimizer, scaler=scaler, losses=losses
    ):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * 0.5 * (1 + math.cos(math.pi * step / STEPS))
        if step % 5 == 0:
            losses[step] = evaluate()
            ends.here(step, "evaluation")
        for micro in range(MICRO):
            x, y = batch()
            ends.here(step, "forward")
            with torch.autocast("cpu", torch.bfloat16, enabled=False):
                loss = loss_of(model, x, y) / MICRO
            if micro < MICRO - 1:
                with lockstep.no_sync(model):
                    scaler.scale(loss).backward()
            else:
                scaler.scale(loss).backward()
        ends.here(step, "backward")
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        ends.here(step, "update")
        optimizer.zero_grad(set_to_none=True)
    ends.tell(*model.parameters(), losses)


if __name__ == "__main__":
    main()
