"""A small GPT-2, and tokens to train it on."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import Dataset

from tests.clients.toy import place


class Tokens(Dataset[Any]):
    """Sequences of random tokens, of which some count for no loss: more in some than in others."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.ids = torch.randint(32, (48, 8), generator=generator)
        self.labels = self.ids.clone()
        for index, row in enumerate(self.labels):
            row[: index % 6] = -100

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> Any:
        return {"input_ids": self.ids[index], "labels": self.labels[index]}


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(place()[0])
    config = GPT2Config(
        vocab_size=32,
        n_positions=8,
        n_embd=16,
        n_layer=1,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config).double()
