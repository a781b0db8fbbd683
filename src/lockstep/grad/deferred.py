"""Deferred gradients: each is summed by the rank that updates it, or by ranks that read it.

Each rank leaves its gradients in a buffer that the other ranks can read. At the end of a backward
there is one barrier, and from then on each rank can compute the mean of any gradient on its own.
The owner of a part of the parameters sums the gradients of this part to update it. No rank sums the
others, unless the program reads ``parameter.grad``.
"""

from __future__ import annotations

import itertools
import math
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Self

import torch
import torch.distributed as dist

from lockstep.comm import (
    SharedBuffers,
    SharedMemoryGroup,
    context_of,
    in_all_groups,
    is_shared,
    reduction_for,
    start_all_reduce,
)
from lockstep.grad.contents import Contents
from lockstep.grad.diagnostics import GradientLog
from lockstep.grad.facts import Facts
from lockstep.grad.memory import ALIGNMENT, BufferPlan, Memory
from lockstep.grad.table import TableSlice
from lockstep.grad.unsummed import UnsummedBucket
from lockstep.torch_private import _InferenceMode, gradient_of, set_gradient

# The most combinations of the ranks' buffers of which views are kept.
_MOST_COMBINATIONS = 8


# By first and last position, each rank's elements.
_Slices = dict[tuple[int, int], list[torch.Tensor]]

# Ranks may be threads.
_lock = threading.Lock()


class _Buckets(weakref.WeakSet["DeferredBucket"]):
    """The deferred buckets of a group, in its context."""


def _sum_before_fork() -> None:
    """Sum unsummed gradients, as other processes will change what a child would sum them from."""
    with _lock:
        buckets = [bucket for each in in_all_groups(_Buckets) for bucket in each]
    for bucket in buckets:
        if is_shared(bucket.contents.memory.buffer):
            bucket.sum_unsummed()


os.register_at_fork(before=_sum_before_fork)


class DeferredBucket(UnsummedBucket):
    """A bucket of deferred gradients, in a group whose ranks can read each other's memory.

    A gradient is unsummed until this rank has summed it. It is summed before the program reads it,
    and before autograd adds to it.
    """

    carries_facts = True

    def __init__(self, contents: Contents, group: SharedMemoryGroup, shared: SharedBuffers) -> None:
        super().__init__(contents, group)
        # The buffers; and the memory in each of this rank's, by its address.
        self.shared, self._group = shared, group
        self._memories = {contents.memory.buffer.data_ptr(): contents.memory}
        with _lock:
            self._of_group = context_of(group).get(_Buckets)
            self._of_group.add(self)
        # What the last backward has left: whether means are the ranks' gradients divided by their
        # number, or their sum; the factor of gradient clipping, for all means; gradients that the
        # program has read, by position, which are kept if they are there in the next backward.
        self._op = dist.ReduceOp.SUM
        self._factor: torch.Tensor | None = None
        self._read: dict[int, weakref.ref[torch.Tensor]] = {}
        # By the addresses of all ranks' buffers, views of them by their first and last position;
        # and those of the current buffers.
        self._kept_slices: dict[tuple[int, ...], _Slices] = {}
        self._slices: _Slices = {}

    @classmethod
    def of(cls, gradients: TableSlice, group: dist.ProcessGroup, num_facts: int) -> Self:
        """Make one, in buffers that the ranks share."""
        assert isinstance(group, SharedMemoryGroup)
        made: list[SharedBuffers] = []

        def first_memory(plan: BufferPlan) -> Memory:
            made.append(SharedBuffers(group, plan.size, plan.dtype, plan.device))
            return plan.memory_in(made[0].local[0])

        contents = Contents(
            gradients,
            tail_size=num_facts,
            buffers_from=group,
            alignment=ALIGNMENT,
            make=first_memory,
        )
        return cls(contents, group, *made)

    def _buffers(self) -> list[torch.Tensor]:
        """The buffers that are to be summed: those of the ranks, or one with the sums."""
        return self.shared.of_ranks or [self.contents.memory.buffer]

    def begin(self) -> None:
        """Prepare for a backward: find a buffer that no other rank reads any more."""
        self.sum_unsummed()
        contents = self.contents
        for position, read in self._read.items():
            gradient = gradient_of(contents.parameters[position])
            if gradient is not None and gradient is read():
                self.contents.now.kept[position] = gradient
        self._read, self._factor = {}, None
        contents.memory = self._memory_in(self.shared.next())

    def _memory_in(self, buffer: torch.Tensor) -> Memory:
        address = buffer.data_ptr()
        if address not in self._memories:
            self._memories[address] = self.contents.plan.memory_in(buffer)
        return self._memories[address]

    def fill_failed(self) -> None:
        """Fill what leaves with NaN, in a buffer for once if the gradients are to stay."""
        contents = self.contents
        if contents.memory.is_held(itertools.repeat(None)):
            buffer = self.shared.new()
            self._group.keep([buffer])
            contents.memory = contents.plan.memory_in(buffer)
        contents.fill_with(math.nan)

    def sum_unsummed(self) -> None:
        """Sum the unsummed gradients, before others are added to them."""
        for position in self.unsummed_positions():
            # In a hook of the parameter, autograd has added the next gradient already.
            more = gradient_of(self.contents.parameters[position])
            summed = self._sum(position)
            if more is not None:
                with torch.no_grad():
                    summed.add_(more)

    def read(self, position: int) -> torch.Tensor | None:
        """Return the gradient at ``position``, which the program may keep and change."""
        parameter, view = self.contents.parameters[position], self.contents.memory.views[position]
        gradient = gradient_of(parameter)
        if self.unsummed[position]:
            gradient = self._sum(position)
            self._note_if_read()
        elif gradient is view:  # in the buffer, which other ranks will read
            with _InferenceMode(False), torch.no_grad():
                gradient = view.clone()
            set_gradient(parameter, gradient)
        if gradient is not None:
            self._read[position] = weakref.ref(gradient)
            self.contents.kept[position] = gradient
        return gradient

    def drop_at(self, position: int) -> None:
        """Drop the unsummed gradient at ``position``: the program has set ``parameter.grad``."""
        if self.unsummed[position]:
            self.unsummed[position] = 0
            self._note_if_read()

    def _note_if_read(self) -> None:
        if 1 not in self.unsummed:
            self.shared.note_read()

    def _sum(self, position: int) -> torch.Tensor:
        """Sum the gradient at ``position``, make it that of the parameter, and return it."""
        view = self.contents.memory.views[position]
        with _InferenceMode(False), torch.no_grad():
            gradient = torch.empty_strided(
                view.shape, view.stride(), dtype=view.dtype, device=view.device
            )
        self._sum_to(gradient, position)
        return gradient

    def _sum_to(self, gradient: torch.Tensor, position: int) -> None:
        with _InferenceMode(False), torch.no_grad():
            like = self.contents.memory.views[position]
            is_alike = gradient.shape == like.shape and gradient.stride() == like.stride()
            total = gradient if is_alike else torch.empty_like(like)
            self.sum_into(total.as_strided((total.numel(),), (1,)), self.contents.offsets[position])
            if total is not gradient:
                gradient.copy_(total)
        self.unsummed[position] = 0
        set_gradient(self.contents.parameters[position], gradient)

    def drop_unsummed(self) -> None:
        """Drop the gradients, all of which are unsummed: the parameters have none besides."""
        super().drop_unsummed()
        self.shared.note_read()

    def sum_into(self, target: torch.Tensor, start: int, *, is_often: bool = False) -> None:
        """Write means over the ranks to ``target``, of one dimension: from element ``start`` on."""
        stop = start + target.numel()
        with _InferenceMode(True):
            slices = self._slices.get((start, stop))
            if slices is None:
                slices = [buffer[start:stop] for buffer in self._buffers()]
                if is_often:
                    self._slices[start, stop] = slices
            reduction_for(self._op, target.dtype).into(target, slices)
            if self._factor is not None:
                target.mul_(self._factor)

    def part_of_mean(self, position: int, start: int, stop: int) -> torch.Tensor:
        """Return some elements of an unsummed gradient, which each rank can compute on its own."""
        contents = self.contents
        view, offset = contents.memory.views[position], contents.offsets[position]
        if view.is_contiguous():
            return self.new_sum(offset + start, offset + stop)
        every = self.new_sum(offset, offset + view.numel())
        return every.as_strided(view.shape, view.stride()).reshape(-1)[start:stop]

    def local_range(self) -> tuple[int, int]:
        """Return the first element that this rank sums for all, and the one after its last."""
        numel = self.contents.numel
        size = -(-numel // self.group.size())
        first = self.group.rank() * size
        return first, min(first + size, numel)

    def are_means_of_parts(self) -> bool:
        """Whether no factor makes means larger than what the ranks have left, or NaN."""
        return self._factor is None or bool(self._factor.abs() <= 1)

    def scale_means(self, factor: torch.Tensor) -> None:
        """Multiply all means, of which none is computed yet, by ``factor``."""
        self._factor = factor if self._factor is None else self._factor * factor

    def __del__(self, is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
        # The parameters may live on, and need their gradients. Not when the interpreter ends: torch
        # aborts over tensors that are made then. Shown by
        # test_a_program_may_end_with_gradients_unread.
        if not is_ending():
            with suppress(Exception):
                self.sum_unsummed()

    def finish(self) -> None:
        """Make the gradients unsummed: all ranks' backwards have succeeded.

        Until now, each parameter had this rank's own gradient, in the buffer.
        """
        grown = self.contents.accumulated.tobytes()
        if self.contents.now.kept or 0 in grown:
            for position in itertools.compress(range(len(grown)), grown):
                self.use_as_grad(position)
        else:  # as in most steps
            deque(map(set_gradient, self.contents.parameters, itertools.repeat(None)), maxlen=0)
            self.unsummed[:] = grown

    def use_as_grad(self, position: int) -> None:
        """Set the gradient of a parameter that any rank used: to the mean, once it is summed."""
        kept = self.contents.now.kept.get(position)
        if kept is not None and kept.shape == self.contents.memory.views[position].shape:
            self._sum_to(kept, position)
            self._read[position] = weakref.ref(kept)
        else:
            set_gradient(self.contents.parameters[position], None)
            self.unsummed[position] = 1

    def end(self) -> None:
        """Drop what belongs to the backward, which is over."""
        self.shared.leave()
        super().end()

    def undo(self) -> None:
        """The backward has failed here: gradients that weren't launched are as before it."""
        self.shared.leave()
        super().undo()

    def launch(self, number: int, *, is_last: bool) -> None:
        """Leave the gradients: :meth:`wait` is the barrier after which all ranks may read them."""
        self.contents.now.is_launched = True
        self._op = dist.ReduceOp.AVG if self.contents.now.is_averaged else dist.ReduceOp.SUM
        self.shared.start(self.contents.memory.buffer)

    def wait(self) -> None:
        """Wait until all ranks have left their gradients."""
        if not self.shared.is_awaited:
            return
        self._sum_old()
        self.shared.wait()
        if not self.shared.of_ranks:  # a rank lacks shared memory
            buffer, size = self.contents.memory.buffer, self.contents.plan.size
            start_all_reduce(self.group, buffer[:size], self._op).wait()
        if len(self._kept_slices) > _MOST_COMBINATIONS:
            self._kept_slices = {}
        addresses = tuple(buffer.data_ptr() for buffer in self._buffers())
        self._slices = self._kept_slices.setdefault(addresses, {})

    def _sum_old(self) -> None:
        """Sum gradients that another rank, which may have dropped its bucket, keeps no longer."""
        if len(self._of_group) == 1:
            return
        with _lock:
            buckets = [*self._of_group]
        for bucket in buckets:
            if not bucket.shared.are_kept_for_long:
                bucket.sum_unsummed()

    def facts(self) -> Facts:
        """Return the facts of all ranks."""
        contents = self.contents
        total = torch.empty_like(contents.memory.tail)
        self.sum_into(total, contents.numel, is_often=True)
        return Facts(total, self.group.size() if self.contents.now.is_averaged else 1)

    def log_of_ranks(self, log: GradientLog) -> None:
        """Have ``log`` compare the gradients of all ranks."""
        log.keep_of_ranks([buffer[: self.contents.numel] for buffer in self._buffers()])
