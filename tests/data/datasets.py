"""Datasets that draw random numbers, that are streams, and that return halves."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, Sampler, get_worker_info

from tests.data.numbers import Numbers


class Augmented(Numbers):
    """Samples with a number of each generator."""

    def __getitem__(self, index: int) -> Any:
        return index, torch.rand(()).item(), random.random(), np.random.rand()


class Stream(IterableDataset[int]):
    """Numbers, divided among workers as torch's documentation tells."""

    def __init__(self, length: int, *, divides: bool = True) -> None:
        self.length, self.divides = length, divides

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        first, step = (0, 1) if info is None or not self.divides else (info.id, info.num_workers)
        return iter(range(first, self.length, step))


class Halves(Sampler[int]):
    """One of a user's own, which draws from the global generators as it goes."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        left = list(range(self.length))
        while left:
            yield left.pop(random.randrange(len(left)) // (1 + int(torch.randint(2, ()))))
