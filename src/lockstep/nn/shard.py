"""The shard of a step's batch whose turn it is on this thread, and means over its samples.

Within a shard a mean is no collective: its weight is told to the other ranks with the gradients,
which are divided by the sum over all shards at the end.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from lockstep.comm import uncompiled
from lockstep.errors import ModelError
from lockstep.nn.autograd import reached


class Shard:
    """A shard in its turn.

    Args:
        number: Its number in the batch.
        close: Gives up the loop over the shards, for as long as anybody has it.

    Attributes:
        number: Its number in the batch.
        weight: The weight of the samples of its means; None before a backward of one.
        total: The weighted sum of the values of its first mean that had a backward.
    """

    def __init__(self, number: int, close: weakref.WeakMethod[Callable[[], None]]) -> None:
        self.number, self._close = number, close
        self.weight: float | None = None
        self.total = 0.0
        self._num_means, self._first = 0, -1

    def abandon(self) -> None:
        """Abandon the loop over the shards, which was left in this one's turn."""
        if (close := self._close()) is not None:
            close()

    def next_mean(self) -> int:
        """Return the number of a mean that is computed now."""
        self._num_means += 1
        return self._num_means

    def note(self, mean: int, weight: float, total: float) -> None:
        """Note that a backward of the mean number ``mean`` runs.

        Raises:
            ModelError: If it isn't this shard's turn any more.
            ValueError: If the shard had another mean of another weight.
        """
        if current_shard() is not self:
            raise ModelError(
                f"A backward of a mean of shard {self.number} runs after its turn in the loop over "
                "lockstep.shards(). Call backward() in the body of the loop, for each shard."
            )
        if self.weight is None:
            self.weight = weight
        elif self.weight != weight:
            raise ValueError(
                f"Shard {self.number} has two means, over {weight:g} and over {self.weight:g} "
                "samples, and gradients that are added up can't be divided by both. Let both be "
                "over as many, or put the values into one mean, with weights."
            )
        if self._first < 0 or mean < self._first:
            self._first, self.total = mean, total


class _Turn(threading.local):
    """The shard whose turn it is on this thread."""

    shard: Shard | None = None


_turn = _Turn()


def current_shard() -> Shard | None:
    """Return the shard whose turn it is on this thread, if there is one."""
    return _turn.shard


def set_current_shard(shard: Shard | None) -> None:
    """Begin the turn of ``shard``, or end one."""
    _turn.shard = shard


def refuse_in_shard(what: str) -> None:
    """Raise ModelError in the body of a loop over shards, where ``what`` doesn't belong."""
    if (shard := current_shard()) is not None:
        raise ModelError(
            f"{what} in the loop over lockstep.shards(), in the turn of shard {shard.number}. "
            "There ranks have different numbers of shards, and gradients are no means yet. Do it "
            "behind the loop. If the loop was left by break or by an error, call close() of what "
            "shards() returned."
        )


def mean_in_shard(shard: Shard, values: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return the mean of ``values``, of weights ``counts``, over the samples of ``shard``."""
    needs_gradient = values.requires_grad or not values.numel()
    anchor = torch.zeros((), device=values.device, requires_grad=needs_gradient)
    result: torch.Tensor = _MeanInShard.apply(values, anchor, counts, shard)  # type: ignore[no-untyped-call]
    return result


@uncompiled
class _MeanInShard(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, values: torch.Tensor, anchor: torch.Tensor, counts: torch.Tensor, shard: Shard
    ) -> torch.Tensor:
        ctx.anchor, ctx.counts, ctx.shard, ctx.number = anchor, counts, shard, shard.next_mean()
        total = (values.detach().to(counts.device).double() * counts).sum()
        ctx.total, ctx.weight, ctx.dtype = total.item(), counts.sum().item(), values.dtype
        if not torch.isfinite(counts).all():
            raise ValueError(
                f"The weights of shard {shard.number} add up to {ctx.weight}. mean() takes finite "
                "weights: give 0 where nothing is to count."
            )
        return (total / counts.sum()).to(values.dtype).to(values.device)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        if reached([ctx.anchor]):  # and not in torch.autograd.grad()
            ctx.shard.note(ctx.number, ctx.weight, ctx.total)
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        slope = gradient.to(ctx.counts.device).double() / (ctx.weight or 1)
        return (slope * ctx.counts).to(ctx.dtype).to(gradient.device), None, None, None
