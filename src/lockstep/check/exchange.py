"""Values that the ranks of a trial tell each other, by files: no process group knows of it."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from typing import Any

import torch

from lockstep.check.records import Plan, of_rank
from lockstep.errors import LockstepError

_POLL_SECONDS = 0.001


class Exchange:
    """What a rank tells the others in a trial, and what they have told.

    Each value has a key, and those of one key are told apart by their number.
    """

    def __init__(self, plan: Plan, rank: int) -> None:
        self._ranks = [plan.records(of_rank(n), plan.trial) for n in range(plan.num_ranks)]
        self._own = self._ranks[rank]
        self._patience = plan.patience
        self._counts: Counter[str] = Counter()
        self.rank = rank

    def gather(self, key: str, value: Any) -> list[Any]:
        """The ``value`` of each rank. Every rank calls it."""
        name = self._next(key)
        self._own.save(name, value)
        return [self._wait(rank, name) for rank in range(len(self._ranks))]

    def of_first(self, key: str, value: Any) -> Any:
        """The ``value`` of rank 0, which waits for nobody."""
        name = self._next(key)
        if self.rank == 0:
            self._own.save(name, value)
            return value
        return self._wait(0, name)

    def told(self, key: str) -> list[Any]:
        """What the ranks have told before, in a run that is over."""
        name = self._next(key)
        return [records.load(name) for records in self._ranks]

    def tell(self, key: str, value: Any) -> None:
        """Tell ``value``, for :meth:`told`."""
        self._own.save(self._next(key), value)

    def _next(self, key: str) -> str:
        self._counts[key] += 1
        return (
            f"told-{hashlib.blake2b(key.encode(), digest_size=8).hexdigest()}-{self._counts[key]}"
        )

    def _wait(self, rank: int, name: str) -> Any:
        limit = time.monotonic() + self._patience
        while not self._ranks[rank].has(name):
            if time.monotonic() > limit:
                raise LockstepError(f"Rank {rank} takes another way through the program.")
            time.sleep(_POLL_SECONDS)
        return self._ranks[rank].load(name)


class Gathered(torch.autograd.Function):
    """The rows of all ranks, one after the other, differentiated by those of this one."""

    @staticmethod
    def forward(
        ctx: Any, own: torch.Tensor, parts: list[torch.Tensor], exchange: Exchange, key: str
    ) -> torch.Tensor:
        """Join ``parts``, of which ``own`` is one."""
        before = sum(len(part) for part in parts[: exchange.rank])
        ctx.rows = slice(before, before + len(own))
        ctx.exchange, ctx.key = exchange, key
        return torch.cat([part.to(own.device) for part in parts])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        """Add up what all ranks' losses say of this one's rows."""
        everyone = ctx.exchange.gather(f"{ctx.key}, backward", gradient.cpu())
        total = torch.stack(everyone).sum(0).to(gradient.device)
        return total[ctx.rows], None, None, None
