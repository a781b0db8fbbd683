"""In the manner of nanoGPT: one script for one process and for many, told by its environment."""

import math
import os
import sys
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed import destroy_process_group, init_process_group

if sys.argv[1] == "lockstep":
    from lockstep import DistributedDataParallel as DDP
else:
    from torch.nn.parallel import DistributedDataParallel as DDP

out_path, backend = sys.argv[2], sys.argv[3]
gradient_accumulation_steps, batch_size, block_size = 4, 2, 8
vocab_size, width, max_iters, warmup_iters, learning_rate = 16, 16, 4, 2, 0.05
grad_clip, weight_decay = 0.5, 0.1


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width))

    def forward(self, x):
        batch, length, _ = x.size()
        q, k, v = (
            part.view(batch, length, 2, -1).transpose(1, 2)
            for part in self.c_attn(self.ln_1(x)).split(width, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab_size, width), nn.Embedding(block_size, width)
        self.h, self.ln_f = nn.ModuleList([Block(), Block()]), nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocab_size, bias=False)
        self.wte.weight = self.lm_head.weight  # tied

    def forward(self, idx, targets=None):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1)))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def configure_optimizers(self):
        params = [p for p in self.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in params if p.dim() >= 2], "weight_decay": weight_decay},
            {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), fused=False)


ddp = int(os.environ.get("RANK", -1)) != -1
if ddp:
    init_process_group(backend=backend)
    ddp_rank, ddp_world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    assert int(os.environ["LOCAL_RANK"]) == ddp_rank
    master_process, seed_offset = ddp_rank == 0, ddp_rank
    assert gradient_accumulation_steps % ddp_world_size == 0
    gradient_accumulation_steps //= ddp_world_size
else:
    master_process, seed_offset, ddp_rank, ddp_world_size = True, 0, 0, 1
torch.manual_seed(1337 + seed_offset)
torch.set_default_dtype(torch.float64)
data = torch.randint(vocab_size, (4096,), generator=torch.Generator().manual_seed(0))


def get_batch(number):
    starts = [(number * batch_size + i) * (block_size + 1) for i in range(batch_size)]
    x = torch.stack([data[start : start + block_size] for start in starts])
    return x, torch.stack([data[start + 1 : start + 1 + block_size] for start in starts])


model = GPT()
optimizer = model.configure_optimizers()
if ddp:
    model = DDP(model)
raw_model = model.module if ddp else model


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    return 0.5 * (1 + math.cos(math.pi * it / max_iters)) * learning_rate


@torch.no_grad()
def estimate_loss():
    raw_model.eval()
    loss = torch.stack([raw_model(*get_batch(100 + k))[1] for k in range(2)]).mean()
    raw_model.train()
    return loss


losses, number = [], 0
for iter_num in range(max_iters):
    for group in optimizer.param_groups:
        group["lr"] = get_lr(iter_num)
    if master_process:  # one rank alone
        losses.append(estimate_loss())
    for micro_step in range(gradient_accumulation_steps):
        if ddp:
            model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        with nullcontext():
            _, loss = model(*get_batch(number + ddp_rank))
            loss = loss / gradient_accumulation_steps
        number += ddp_world_size
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
torch.save(
    {"model": raw_model.state_dict(), "losses": losses}, os.path.join(out_path, f"{ddp_rank}.pt")
)
if ddp:
    destroy_process_group()
