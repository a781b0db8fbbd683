"""What a rank calls, in a form that can be compared with what the others call."""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple

import torch

FINGERPRINT_BYTES = 16


class Call(NamedTuple):
    """One call of a collective. Ranks must make equal calls, in the same order.

    Attributes:
        operation: Its name, as in ``torch.distributed``.
        dtype: That of the tensors, or None if there are none.
        shape: The shape, or sizes, that must be the same on every rank.
        reduce_op: How values are combined, such as ``"SUM"``, or ``""``.
        root: The rank that sends or receives, or None.
    """

    operation: str
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()
    reduce_op: str = ""
    root: int | None = None

    def __str__(self) -> str:
        details = [self.reduce_op] if self.reduce_op else []
        if self.root is not None:
            details.append(f"root {self.root}")
        words = f"{self.operation}({', '.join(details)})"
        if self.dtype is not None:
            words += f" of {tuple(self.shape)} {str(self.dtype).removeprefix('torch.')}"
        return words


@lru_cache(maxsize=4096)
def fingerprint(call: Call) -> bytes:
    """Sixteen bytes that are the same on all ranks for equal calls, and else differ."""
    return blake2b(str(call).encode(), digest_size=FINGERPRINT_BYTES).digest()
