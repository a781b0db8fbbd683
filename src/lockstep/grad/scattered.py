"""Scattered gradients: each rank gets the means of those that it updates, and no others.

Buckets are reduced by a reduce-scatter, while the backward computes other gradients. That sends
half of what an all-reduce sends. The means of all ranks are gathered when the program reads one of
them, which every rank must do then.
"""

from __future__ import annotations

import itertools
from typing import Self

import torch
import torch.distributed as dist

from lockstep.comm import (
    all_gather_in_place,
    join_state_of,
    start_all_reduce,
    start_reduce_scatter,
)
from lockstep.grad.contents import Contents
from lockstep.grad.memory import ALIGNMENT, aligned
from lockstep.grad.table import TableSlice
from lockstep.grad.unsummed import UnsummedBucket
from lockstep.torch_private import gradient_of, set_gradient


class ScatteredBucket(UnsummedBucket):
    """A bucket of which each rank of ``group`` gets the means of an equal part of the elements.

    A gradient is unsummed until the means of all ranks have been gathered. From then on gradients
    are views of the buffer, as in other buckets.
    """

    @classmethod
    def of(cls, gradients: TableSlice, group: dist.ProcessGroup, num_facts: int) -> Self:
        """Make one, whose padding at the end makes the means of each rank equally many."""
        numel = sum(aligned(parameter.numel()) for _, parameter in gradients.named)
        padding = group.size() * aligned(-(-numel // group.size())) - numel
        contents = Contents(gradients, tail_size=padding, buffers_from=group, alignment=ALIGNMENT)
        return cls(contents, group)

    def local_range(self) -> tuple[int, int]:
        """Return the first element whose mean this rank has, and the one after its last."""
        numel, size = self.contents.numel, len(self.contents.memory.buffer) // self.group.size()
        first = self.group.rank() * size
        return min(first, numel), min(first + size, numel)

    def begin(self) -> None:
        """Prepare for a backward, which adds to gradients that are there."""
        self.sum_unsummed()
        super().begin()
        contents = self.contents
        self.contents.now.has_holders = contents.memory.has_holders(
            map(gradient_of, contents.parameters)
        )

    def is_watched(self) -> bool:
        """Whether the program may see its gradients past ``parameter.grad``, which gathers them.

        Then ranks gather them at the end of the backward; not on a GPU, where they would have to
        wait for it in each step to learn of each other.
        """
        return self.contents.now.has_holders or bool(self.contents.now.kept)

    def sum_watched(self) -> None:
        """Gather the means of all ranks."""
        self.sum_unsummed()

    def launch(self, number: int, *, is_last: bool) -> None:
        """Start the reduce-scatter of the gradients.

        In join() it is an all-reduce: ranks without data don't know when others read gradients.
        Shown by test_ranks_may_have_loops_of_different_lengths.
        """
        now = self.contents.now
        now.is_launched, now.is_reduced = True, join_state_of(self.group) is not None
        start = start_all_reduce if now.is_reduced else start_reduce_scatter
        now.work = start(self.group, self.contents.memory.buffer)

    def finish(self) -> None:
        """Make the gradients unsummed: all ranks' backwards have succeeded."""
        if self.contents.now.is_reduced:
            return
        for position in itertools.compress(range(len(self.unsummed)), self.contents.accumulated):
            self.use_as_grad(position)

    def use_as_grad(self, position: int) -> None:
        """Make the gradient of a parameter that any rank used unsummed."""
        if self.contents.now.is_reduced:
            super().use_as_grad(position)
            return
        self.contents.now.unchanged.pop(position, None)
        set_gradient(self.contents.parameters[position], None)
        self.unsummed[position] = 1

    def settle(self) -> None:
        """Restore the gradients that haven't grown: elsewhere, if the memory is yet to be gathered.

        Autograd adds to a gradient before the next backward is known of here, which gathers others.
        """
        if 1 in self.unsummed:
            self.contents.take_unchanged()
        super().settle()

    def read(self, position: int) -> torch.Tensor | None:
        """Return the gradient at ``position``, which the program may keep and change.

        If it is unsummed, every rank must call it; it blocks.
        """
        if self.unsummed[position]:
            self.sum_unsummed()
        return gradient_of(self.contents.parameters[position])

    def sum_unsummed(self) -> None:
        """Gather the means of all ranks, and make those that are unsummed the gradients."""
        if 1 not in self.unsummed:
            return
        contents, views = self.contents, self.contents.memory.views
        with torch.no_grad():
            all_gather_in_place(self.group, contents.memory.buffer)
            for position in self.unsummed_positions():
                # In a hook of the parameter, autograd has added the next gradient already.
                more = gradient_of(contents.parameters[position])
                if more is not None:
                    views[position].add_(more)
                kept = contents.kept.get(position)
                if kept is not None:
                    set_gradient(contents.parameters[position], kept.copy_(views[position]))
                else:
                    contents.use_views(position, position + 1)
        self.drop_unsummed()

    def sum_into(self, target: torch.Tensor, start: int, *, is_often: bool = False) -> None:
        """Copy means to ``target``, of one dimension: from element ``start`` on, this rank's."""
        target.copy_(self.means(start, start + target.numel()))

    def means(self, start: int, stop: int) -> torch.Tensor:
        """Return the means of the elements from ``start`` to ``stop``, all of them this rank's."""
        return self.contents.memory.buffer[start:stop]

    new_sum = means

    def scale_means(self, factor: torch.Tensor) -> None:
        """Multiply all means, of which none has been read yet, by ``factor``.

        Not the padding between them, which must stay 0, and would become NaN with the factor.
        """
        first, last = self.local_range()
        for offset, view in zip(self.contents.offsets, self.contents.memory.views, strict=False):
            start, stop = max(first, offset), min(last, offset + view.numel())
            if start < stop:
                self.means(start, stop).mul_(factor)
