"""A dataset whose samples tell which they are."""

from __future__ import annotations

from typing import Any

from torch.utils.data import Dataset


class Numbers(Dataset[Any]):
    """The numbers below ``length``."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return index
