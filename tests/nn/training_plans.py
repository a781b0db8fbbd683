"""Courses of training as plain data, from which one process, or each rank, carries out its own.

A plan says everything that is done, so one that fails can be printed, and run again alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from tests.nn.random_models import Part, Use


class Setting(NamedTuple):
    """What stays the same throughout a course of training.

    Attributes:
        world_size: How many ranks there are.
        recipe: The parts of the model.
        frozen: Which of them are frozen when it is made parallel.
        is_wrapped: Whether it is in a DistributedDataParallel, or parallel in place.
        bucket_cap_mb: How much makes a bucket full.
        momentum: The optimizer's.
    """

    world_size: int
    recipe: Sequence[Part]
    frozen: Sequence[int]
    is_wrapped: bool
    bucket_cap_mb: float
    momentum: float


class Loss(NamedTuple):
    """A batch, and what each rank does with its part of it.

    Attributes:
        seed: Which batch.
        sizes: How many samples of it each rank has.
        uses: What each rank does with them.
    """

    seed: int
    sizes: Sequence[int]
    uses: Sequence[Use]


class Backward(NamedTuple):
    """One backward.

    Attributes:
        of: Of which losses of the round it is; of their sum, if they are several.
        how: "reduce", or in which context it runs, of :data:`CONTEXTS`.
    """

    of: Sequence[int]
    how: str


CONTEXTS = ("no_sync", "accumulate", "own no_sync")


class Round(NamedTuple):
    """Some forwards and then some backwards, in which a loss may come several times or never.

    Attributes:
        frozen: Which parts are frozen.
        zero: ``set_to_none`` of a zero_grad() before it; None for no such call.
        losses: What is computed.
        is_forward_accumulating: Whether that is in a no_sync() which is left before the backwards.
        backwards: In this order.
    """

    frozen: Sequence[int]
    zero: bool | None
    losses: Sequence[Loss]
    is_forward_accumulating: bool
    backwards: Sequence[Backward]

    def uses_of(self, backward: Backward, rank: int) -> Sequence[Use]:
        """What leads to one of the backwards on this rank."""
        return [self.losses[i].uses[rank] for i in backward.of]


class Step(NamedTuple):
    """Some rounds, and a step of an optimizer, which may be a new one."""

    rounds: Sequence[Round]
    has_new_optimizer: bool


class Training(NamedTuple):
    """A course of training whose losses are sums over samples."""

    setting: Setting
    steps: Sequence[Step]


class MicroBatch(NamedTuple):
    """A batch of which a mean is taken.

    Attributes:
        loss: The samples, and what becomes of them. A rank without samples may touch nothing.
        kind: How they are weighted: "none", "scalar" or "each".
        factors: What each rank's weights are multiplied by.
        is_by_column: Whether there is a value for each sample and column, or for each sample.
        is_bare: Whether accumulate() is given what is in the wrapper.
    """

    loss: Loss
    kind: str
    factors: Sequence[float]
    is_by_column: bool
    is_bare: bool

    def weight(self, rank: int) -> torch.Tensor | float | None:
        """What ``lockstep.mean`` is given on this rank."""
        if self.kind == "none":
            return None
        if self.kind == "scalar":
            return self.factors[rank]
        generator = torch.Generator().manual_seed(100 * self.loss.seed + rank)
        each = torch.randint(0, 4, (self.loss.sizes[rank],), generator=generator).double()
        each[:1] = 3.0  # so that it isn't all zeros by chance
        each *= self.factors[rank]
        return each[:, None] if self.is_by_column else each


class Batch(NamedTuple):
    """Micro-batches whose gradients are those of one mean.

    Attributes:
        dropped: Micro-batches whose gradients are added up and dropped before it begins.
        zero: ``set_to_none`` of a zero_grad() before it; None for no such call.
        micro_batches: What it is made of; all but the last under accumulate().
        is_in_one_context: Whether these share one such context, or each has its own.
        steps: Whether the optimizer steps after it.
    """

    dropped: Sequence[MicroBatch]
    zero: bool | None
    micro_batches: Sequence[MicroBatch]
    is_in_one_context: bool
    steps: bool


class MeanTraining(NamedTuple):
    """A course of training whose losses are weighted means."""

    setting: Setting
    batches: Sequence[Batch]
