"""The shard of a step's batch whose turn it is on this thread, and means over its samples.

Within a shard a mean is no collective: its weight is told to the other ranks with the gradients,
which are divided by the sum over all shards at the end.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lockstep.comm import uncompiled
from lockstep.errors import ModelError
from lockstep.nn.autograd import reached
from lockstep.torch_private import _current_graph_task_id

# A number that is known, or one on a device, for which nobody waits before the end of the step.
Number = float | torch.Tensor


class Shard:
    """A shard in its turn.

    Args:
        number: Its number in the batch.
        close: Gives up the loop over the shards, for as long as anybody has it.

    Attributes:
        number: Its number in the batch.
        weights: The weights of the samples of its means that had a backward, as far as they may
            differ.
        total: The weighted sum of the values of the first of them.
    """

    def __init__(self, number: int, close: weakref.WeakMethod[Callable[[], None]]) -> None:
        self.number, self._close = number, close
        self.weights: list[Number] = []
        self.total: Number = 0.0
        self._num_means, self._first = 0, -1

    @property
    def weight(self) -> Number | None:
        """The weight of the samples of its means; None before a backward of one."""
        return self.weights[0] if self.weights else None

    def abandon(self) -> None:
        """Abandon the loop over the shards, which was left in this one's turn."""
        if (close := self._close()) is not None:
            close()

    def next_mean(self) -> int:
        """Return the number of a mean that is computed now."""
        self._num_means += 1
        return self._num_means

    def note(self, mean: int, weight: Number, total: Number) -> None:
        """Note that a backward of the mean number ``mean`` runs.

        Raises:
            ModelError: If it isn't this shard's turn any more.
            ValueError: If the shard had another mean of another weight, as far as that is known.
        """
        if current_shard() is not self:
            raise ModelError(
                f"A backward of a mean of shard {self.number} runs after its turn in the loop over "
                "lockstep.shards(). Call backward() in the body of the loop, for each shard."
            )
        if all(isinstance(each, float) for each in (weight, *self.weights)):
            self.check([*self.weights, weight])
            self.weights = [weight]
        else:
            self.weights.append(weight)
        if self._first < 0 or mean < self._first:
            self._first, self.total = mean, total

    def check(self, weights: Sequence[Number]) -> None:
        """Raise ValueError unless all ``weights`` of its means, which are known, are the same."""
        for weight in weights[1:]:
            if weight != weights[0]:
                raise ValueError(
                    f"Shard {self.number} has two means, over {weight:g} and over {weights[0]:g} "
                    "samples, and gradients that are added up can't be divided by both. Let both "
                    "be over as many, or put the values into one mean, with weights."
                )


class _Turn(threading.local):
    """The shard whose turn it is on this thread."""

    shard: Shard | None = None


class _TurnOfProcess:
    """The shard whose turn it is in this process: one thread at a time has its turn."""

    shard: Shard | None = None


_turn, _turn_of_process = _Turn(), _TurnOfProcess()


def current_shard() -> Shard | None:
    """Return the shard whose turn it is on this thread, if there is one.

    Autograd computes gradients of an accelerator in threads of its own, which are those of the
    shard whose turn it is.
    """
    if _turn.shard is None and _turn_of_process.shard is not None and _is_thread_of_autograd():
        return _turn_of_process.shard
    return _turn.shard


def _is_thread_of_autograd() -> bool:
    if _current_graph_task_id() == -1:
        return False
    started = {each.ident for each in threading.enumerate() if not _is_foreign(each)}
    return threading.get_ident() not in started


def _is_foreign(thread: threading.Thread) -> bool:
    return thread.daemon and thread.name.startswith("Dummy-")  # Python hasn't started it


def set_current_shard(shard: Shard | None) -> None:
    """Begin the turn of ``shard``, or end one."""
    _turn.shard = _turn_of_process.shard = shard


def refuse_in_shard(what: str) -> None:
    """Raise ModelError in the body of a loop over shards, where ``what`` doesn't belong."""
    if (shard := current_shard()) is not None:
        raise ModelError(
            f"{what} in the loop over lockstep.shards(), in the turn of shard {shard.number}. "
            "There ranks have different numbers of shards, and gradients are no means yet. Do it "
            "behind the loop. If the loop was left by break or by an error, call close() of what "
            "shards() returned."
        )


def mean_in_shard(
    shard: Shard, values: torch.Tensor, counts: torch.Tensor, weight: object
) -> torch.Tensor:
    """Return the mean of ``values``, of weights ``counts``, over the samples of ``shard``.

    ``weight`` is what the program has given for ``counts``.
    """
    needs_gradient = values.requires_grad or not values.numel()
    anchor = torch.zeros((), device=values.device, requires_grad=needs_gradient)
    total = (values.detach().to(counts.device).double() * counts).sum()
    its_weight: Number = counts.sum()
    if counts.device.type == "cpu":
        its_weight = counts.sum().item()
        if not torch.isfinite(counts).all():
            raise ValueError(
                f"The weights of shard {shard.number} add up to {its_weight}. mean() takes finite "
                "weights: give 0 where nothing is to count."
            )
    elif weight is None or isinstance(weight, int | float):
        its_weight = values.numel() * (1.0 if weight is None else float(weight))
    result: torch.Tensor = _MeanInShard.apply(  # type: ignore[no-untyped-call]
        values, anchor, counts, total, its_weight, shard
    )
    return result


@uncompiled
class _MeanInShard(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        values: torch.Tensor,
        anchor: torch.Tensor,
        counts: torch.Tensor,
        total: torch.Tensor,
        weight: Number,
        shard: Shard,
    ) -> torch.Tensor:
        ctx.anchor, ctx.counts, ctx.shard, ctx.number = anchor, counts, shard, shard.next_mean()
        ctx.weight, ctx.dtype = weight, values.dtype
        ctx.total = total.item() if total.device.type == "cpu" else total
        return (total / counts.sum()).to(values.dtype).to(values.device)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        if reached([ctx.anchor]):  # and not in torch.autograd.grad()
            ctx.shard.note(ctx.number, ctx.weight, ctx.total)
        if not ctx.needs_input_grad[0]:
            return (None,) * 6
        slope = gradient.to(ctx.counts.device).double()
        if isinstance(ctx.weight, float):
            slope = slope / (ctx.weight or 1)
        else:
            slope = slope / torch.where(ctx.weight != 0, ctx.weight, 1)
        return (slope * ctx.counts).to(ctx.dtype).to(gradient.device), *[None] * 5
