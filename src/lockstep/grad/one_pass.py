"""What belongs to one backward, in a reducer and in its buckets, and what a backward leaves.

A pass is made when the first gradient comes or the backward begins, and dropped at its end, with
all of its fields: nothing is reset.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum, auto
from typing import NamedTuple, Protocol

import torch

from lockstep.comm import Started
from lockstep.grad.facts import WhoTold
from lockstep.grad.table import GradientTable

# The state of a gradient in one backward. AWAITED: its bucket waits for it. UNUSED: its bucket
# doesn't, as the backward probably won't compute it. READY: it has been computed. Numbers and not
# an Enum, as they are compared for each gradient of each step.
AWAITED, UNUSED, READY = 0, 1, 2


class Phase(Enum):
    """The state of a reducer in the course of a step."""

    IDLE = auto()  # no backward runs, or none has begun here, though gradients have come
    COLLECTING = auto()  # a backward runs or ends; full buckets are launched
    FAILED = auto()  # a backward has failed here, and has yet to be finished with the other ranks


class Launching(Protocol):
    """A reducer, as others see it that launch in the same backward."""

    def launch_full_buckets(self) -> bool:
        """Launch full buckets, up to the first that isn't; return whether only the last is left."""


class Result(NamedTuple):
    """What a backward has left, for the steps that follow.

    Attributes:
        order: The indices of parameters that got a gradient on this rank, as they became ready;
            None before the first backward.
        unused: The indices of parameters that got none, in ascending order.
        used_by_any: For each position, a number above 0 if any rank had a gradient.
        told: Which ranks are known to have had a fact to tell.
    """

    order: Sequence[int] | None = None
    unused: Sequence[int] = ()
    used_by_any: Iterable[float] = ()
    told: WhoTold = WhoTold.NOBODY


class ReducerPass:
    """One backward, in a reducer.

    Attributes:
        phase: IDLE until the backward has begun here.
        launch_order: The reducers of this backward, in the order in which they launch.
        scale: The factor of each rank's gradients in the sum.
        copies_early: Whether gradients are copied before their bucket is full. They must not be if
            a nested backward may add to them later, or if they have a graph.
        is_to_tell: Whether this rank has a fact to tell the others, whatever it is.
        states: The state of each gradient, by position.
        arrivals: The indices of parameters, as their gradients became ready.
        next_position: The position of the next gradient, if they come in order.
        next_launch: The index of the bucket to be launched next.
        reduced_sparse: The means of sparse gradients, by position; None: not sent.
    """

    def __init__(self, sparse: range, phase: Phase) -> None:
        self.phase, self.is_to_tell = phase, False
        self.launch_order: Sequence[Launching] = ()
        self.scale, self.copies_early = 1.0, False
        self.states = bytearray(sparse.start) + bytes([UNUSED]) * len(sparse)
        self.arrivals: list[int] = []
        self.next_position = self.next_launch = 0
        self.reduced_sparse: dict[int, torch.Tensor | None] = {}

    def note_arrival(self, table: GradientTable, position: int) -> None:
        """Note that the gradient at ``position`` is ready."""
        self.states[position] = READY
        table.accumulated[position] = 1
        self.arrivals.append(table.order[position])

    def result(self, order: Sequence[int]) -> Result:
        """Return what it leaves, but for what other ranks told; ``order`` has all indices."""
        lacks = len(self.arrivals) < len(order)
        return Result(self.arrivals, sorted({*order} - {*self.arrivals}) if lacks else ())


class BucketPass:
    """One backward, in a bucket.

    Attributes:
        num_missing: The number of gradients that the backward has yet to compute.
        scale: The factor of gradients on their way into the memory.
        is_averaged: Whether the group averages the gradients, instead of summing them.
        num_copied: The number of gradients that were copied before the bucket was full.
        copy_scale: The factor they were multiplied by: 1 as long as the backward may add to them.
        is_launched: Whether the bucket was launched, or skipped as no rank uses it.
        work: Its collective, while it runs.
        hooked: The result of its communication hook, while that runs.
        kept: By position, gradients that the program has too: a parameter's stays the same tensor.
        unchanged: By position, copies of gradients in the memory that haven't grown on this rank.
        is_reduced: Whether a bucket that is scattered was all-reduced instead.
        has_holders: Whether the program has views of the memory in which gradients are added to.
        full_at, launched_at: When its last gradient came, if all have, and when it was launched.
    """

    def __init__(self, num_missing: int, scale: float, *, is_averaged: bool) -> None:
        self.num_missing, self.scale, self.is_averaged = num_missing, scale, is_averaged
        self.num_copied, self.copy_scale = 0, 1.0
        self.is_launched = False
        self.work: Started | None = None
        self.hooked: torch.futures.Future[torch.Tensor] | None = None
        self.kept: dict[int, torch.Tensor] = {}
        self.unchanged: dict[int, torch.Tensor] = {}
        self.is_reduced = self.has_holders = False
        self.full_at = self.launched_at = 0
