"""Models with a table that is looked up, whose gradient travels by rows or whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from lockstep.grad import row_bucket
from lockstep.nn.backward import engines_with

ROWS, WIDTH = 40, 3


@contextmanager
def tables_from(num_bytes: int) -> Iterator[None]:
    """Let gradients of tables of this size and larger ones travel by rows."""
    before = row_bucket.MIN_TABLE_BYTES
    row_bucket.MIN_TABLE_BYTES = num_bytes
    try:
        yield
    finally:
        row_bucket.MIN_TABLE_BYTES = before


def by_rows(model: nn.Module) -> bool:
    """Whether the gradient of the model's table was sent by rows in the last backward."""
    (engine,) = engines_with([*model.parameters()])
    return any(
        type(bucket).__name__ == "RowBucket" and bucket.num_bytes < bucket.contents.num_bytes
        for bucket in engine.reducer._buckets
    )


class Table(nn.Module):
    """A table that is looked up in one way, and a layer."""

    def __init__(
        self, kind: str = "embedding", mode: str = "sum", padding: int | None = None
    ) -> None:
        super().__init__()
        is_bag = kind in ("bags", "weighted", "last")
        options: dict[str, Any] = {"padding_idx": padding}
        if is_bag:
            options |= {"mode": mode, "include_last_offset": kind == "last"}
        self.table = (nn.EmbeddingBag if is_bag else nn.Embedding)(ROWS, WIDTH, **options)
        self.layer = nn.Linear(WIDTH, 2)
        self.kind, self.padding = kind, padding

    def look_up(self, words: torch.Tensor) -> torch.Tensor:
        """Return a row for each row of ``words``."""
        if self.kind == "function":
            return F.embedding(words, self.table.weight, self.padding).sum(1)
        if self.kind == "embedding":
            return self.table(words).sum(1)
        if isinstance(self.table, nn.EmbeddingBag) and not words.numel():
            ends = int(self.kind == "last")
            weights = words.flatten().to(self.layer.weight.dtype)
            options = {"per_sample_weights": weights} if self.kind == "weighted" else {}
            starts = torch.zeros(len(words) + ends, dtype=torch.int64)
            return self.table(words.flatten(), starts, **options)
        if self.kind == "weighted":
            weights = words.to(self.layer.weight.dtype) + self.layer.bias.sum()
            return self.table(words, per_sample_weights=weights)
        if self.kind == "last":
            ends = [max(0, words.numel() - 1)] * (len(words) - 1)  # bags in between are empty
            return self.table(words.flatten(), torch.tensor([0, *ends, words.numel()]))
        return self.table(words)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.layer(torch.tanh(self.look_up(words)))


def build(dtype: torch.dtype = torch.float64, **options: Any) -> Table:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Table(**options).to(dtype)


def bits_of(tensor: torch.Tensor | None) -> bytes:
    return b"" if tensor is None else bytes(tensor.reshape(-1).view(torch.uint8).tolist())


def equal_bits(mine: Sequence[torch.Tensor | None], theirs: Sequence[torch.Tensor | None]) -> bool:
    return [*map(bits_of, mine)] == [*map(bits_of, theirs)]


def one_step(model: nn.Module, words: torch.Tensor) -> None:
    model.zero_grad()
    model(words).square().mean().backward()


def words_of(rank: int, step: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randint(0, ROWS, (3, 1), generator=generator)
