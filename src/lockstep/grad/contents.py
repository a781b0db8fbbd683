"""What is in a bucket: gradients side by side in one memory, copied there and back."""

from __future__ import annotations

import itertools
import operator
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from lockstep.errors import ParameterChanged
from lockstep.grad.comm_hook import view_like
from lockstep.grad.memory import (
    BufferPlan,
    Memory,
    aligned,
    gradient_dtype,
    is_new,
)
from lockstep.grad.one_pass import READY, BucketPass
from lockstep.grad.table import TableSlice
from lockstep.torch_private import _foreach_copy_, gradient_of, set_gradient

# From this average size on, each gradient is copied and scaled in one call. Below it, the calls
# cost more than a second pass over the memory (2 us against 16 K elements).
_LARGE_NUMEL = 16 * 1024
# Smaller gradients are copied in chunks of this size.
_CHUNK_NUMEL = 128 * 1024
# To be mapped over gradients without a call in Python for each.
_layout_of = operator.attrgetter("layout")
_pointer_of = torch.Tensor.data_ptr


class Contents:
    """The gradients of some parameters, side by side in one memory.

    Between two backwards, ``parameter.grad`` of every reduced gradient IS its view of the memory:
    nothing is copied back, and if the next backward finds it there still, autograd adds to it in
    place. A gradient that the program keeps after it is no ``parameter.grad`` any more stays as it
    is. See Note [Gradients that the program holds].

    Args:
        gradients: Which ones. The reducer goes on writing to ``gradients.accumulated``.
        tail_size: The number of elements to reserve for facts behind the gradients.
        buffers_from: The group that allocates the buffer, in memory that it reduces in place.
        is_tail_apart: Whether facts have memory of their own.
        like: A parameter from which it takes dtype and device if there are none.
        alignment: The number of elements at a multiple of which each gradient begins, with padding
            before it, which stays zero; 0 for gradients without padding.
        make: Makes the first memory.

    Attributes:
        stop: The position of the first gradient of the next bucket.
        is_large: Whether gradients are copied and scaled one by one.
        chunk: The least number of gradients that :meth:`copy_ready` copies at once.
        plan: What makes further memories.
        memory: Where the gradients of the next backward are left.
        now: What belongs to the backward that runs; outside of one there is none.
    """

    now: BucketPass

    def __init__(
        self,
        gradients: TableSlice,
        *,
        tail_size: int = 0,
        buffers_from: dist.ProcessGroup | None = None,
        is_tail_apart: bool = False,
        like: torch.Tensor | None = None,
        alignment: int = 0,
        make: Callable[[BufferPlan], Memory] = BufferPlan.new,
    ) -> None:
        # The gradients: whose, which, and where.
        named, self.accumulated, self.start = gradients
        self.parameter_names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self.stop = self.start + len(named)
        sizes = [aligned(p.numel(), alignment) for p in self.parameters]
        self.offsets = [0, *itertools.accumulate(sizes)]
        self.numel = self.offsets[-1]  # with the padding
        # How they are copied.
        self.is_large = self.numel >= _LARGE_NUMEL * len(sizes)
        smaller = max(1, _CHUNK_NUMEL * len(sizes) // max(1, self.numel))
        self.chunk = 1 if self.is_large else smaller
        first = self.parameters[0] if named or like is None else like
        self.plan = BufferPlan(
            [*map(_form_of, self.parameters)],
            self.offsets,
            tail_size,
            gradient_dtype(first),
            first.device,
            buffers_from,
            is_tail_apart,
        )
        self.memory = make(self.plan)
        # The memory before this one, if the program held gradients in it at the last backward.
        self._left: Memory | None = None

    @property
    def gradients(self) -> torch.Tensor:
        """The gradients, as a tensor of one dimension."""
        return self.memory.gradients[: self.numel]

    @property
    def num_bytes(self) -> int:
        """The size of the buffer: gradients, facts, and what else the group has behind them."""
        return self.memory.buffer.nbytes

    @property
    def kept(self) -> dict[int, torch.Tensor]:
        """What the program keeps of the backward that runs; between backwards, an empty dict."""
        return self.now.kept if hasattr(self, "now") else {}

    def open_pass(self, scale: float, *, is_averaged: bool) -> None:
        """Take up what belongs to a backward, before anything in it can fail."""
        self.now = BucketPass(len(self.parameters), scale, is_averaged=is_averaged)

    def end_pass(self) -> None:
        """Drop what belongs to the backward, which is over."""
        vars(self).pop("now", None)

    def leave_held(self, gradients: Iterable[torch.Tensor | None]) -> None:
        """Leave the memory to the program if it holds any other than ``gradients``, by position.

        Two memories take turns with a program that keeps the last gradients until it has others.
        """
        if not self.memory.is_held(gradients):
            self._left = None
            return
        left, self._left = self._left, self.memory
        nothing = itertools.repeat(None)
        is_free = left is not None and not left.is_held(nothing)
        self.memory = left if left is not None and is_free else self.plan.new()

    def elsewhere(self) -> list[int]:
        """Return the positions of gradients that aren't in its memory, and are dense."""
        gradients = [*map(gradient_of, self.parameters)]
        are_there = map(operator.is_not, gradients, itertools.repeat(None))
        return [
            position
            for position in itertools.compress(range(len(gradients)), are_there)
            if gradients[position] is not self.memory.views[position]
            and _layout_of(gradients[position]) is torch.strided
            and not is_new(self.parameters[position])
        ]

    def copy_ready(self, states: bytearray) -> None:
        """Copy the gradients before the first missing one, although not all are there.

        They are still in the cores' caches, and autograd's memory is free again earlier.
        """
        now = self.now
        missing = states[self.start + now.num_copied : self.stop].lstrip(bytes([READY]))
        last = len(self.parameters) - len(missing)
        if last - now.num_copied >= self.chunk:
            self._copy(now.num_copied, last, now.copy_scale)
            now.num_copied = last

    def chunk_ends(self) -> Sequence[torch.Tensor]:
        """Return the parameters with whose gradients chunks end, if they come in order."""
        chunks, last = self.parameters[self.chunk - 1 :: self.chunk], self.parameters[-1:]
        return chunks if [*map(id, chunks[-1:])] == [*map(id, last)] else chunks + last

    def is_too_late_for(self, position: int) -> bool:
        """Whether the gradient at ``position`` in this bucket has been launched, or scaled."""
        now = self.now
        return now.is_launched or (now.copy_scale != 1 and position < now.num_copied)

    def fill(self) -> None:
        """Copy every gradient, scaled, into the memory; zeros for parameters without one.

        If a gradient hasn't grown since the last reduction, a copy is kept: if it hasn't grown on
        any rank, its bits must not change. Shown by test_gradient_nobody_touched_keeps_its_bits.

        Raises:
            ParameterChanged: If a parameter no longer has the shape, dtype or device it had.
        """
        now, memory = self.now, self.memory
        copied, copy_scale = now.num_copied, now.copy_scale
        if copied:
            gradients = map(gradient_of, self.parameters[:copied])
            if not all(map(operator.is_, gradients, memory.views)):
                # A hook of the program has replaced gradients since they were copied. Shown by
                # test_a_gradient_may_be_replaced_after_its_copy.
                for position in range(copied):
                    if gradient_of(self.parameters[position]) is not memory.views[position]:
                        self._copy(position, position + 1, copy_scale)
            if copy_scale != now.scale:
                memory.gradients[: self.offsets[copied]].mul_(now.scale)
        self._copy(copied, len(self.parameters), now.scale)

    def fill_with(self, value: float) -> None:
        """Fill the memory with ``value``."""
        for view in self.memory.views:
            view.fill_(value)  # not the padding between gradients, which stays 0

    def undo_copies(self) -> None:
        """Undo the scaling of gradients by a backward that has failed.

        Launched gradients are dropped instead, as a collective may still write to their memory.
        """
        now = self.now
        if now.is_launched:
            self.drop()
        elif now.copy_scale != 1:
            self.memory.gradients[: self.offsets[now.num_copied]].div_(now.copy_scale)
            now.num_copied = 0
        self.take_unchanged()

    def take_unchanged(self) -> None:
        """Set gradients that haven't grown to their copies: the memory has others, or will have."""
        unchanged = self.now.unchanged
        while unchanged:
            position, gradient = unchanged.popitem()
            if gradient_of(self.parameters[position]) is self.memory.views[position]:
                set_gradient(self.parameters[position], gradient)

    def restore_unchanged(self) -> None:
        """Restore the gradients that haven't grown on any rank, once all others are used."""
        views = self.memory.views
        for position, gradient in self.now.unchanged.items():
            if gradient_of(self.parameters[position]) is views[position]:
                views[position].copy_(gradient)

    def drop(self) -> None:
        """Drop the gradients of this backward, which has failed here or on another rank."""
        self.take_unchanged()
        for position, parameter in enumerate(self.parameters):
            ours = (self.memory.views[position], self.now.kept.get(position))
            if self.accumulated[position] and any(gradient_of(parameter) is one for one in ours):
                set_gradient(parameter, None)
        self.accumulated[:] = bytes(len(self.accumulated))

    def _copy(self, first: int, last: int, scale: float) -> None:
        """Copy the gradients from position ``first`` to ``last``, times ``scale``."""
        self.renew_views(first, last)
        memory = self.memory
        views, parameters = memory.views[first:last], self.parameters[first:last]
        sources: list[Any] = [*map(gradient_of, parameters)]
        if (
            not self.now.kept
            and not any(map(operator.is_, sources, views))
            and not any(map(operator.is_, sources, itertools.repeat(None)))
            and {*map(_layout_of, sources)} <= {torch.strided}
            and 0 not in self.accumulated[first:last].tobytes()
        ):
            self.use_views(first, last)  # as in most steps
        else:
            views, sources = self._copies_of(first, last)
        if self.is_large:
            for view, source in zip(views, sources, strict=True):
                torch.mul(source, scale, out=view)
            return
        if views:
            _foreach_copy_(views, sources)
        if scale != 1:
            memory.gradients[self.offsets[first] : self.offsets[last]].mul_(scale)

    def renew_views(self, first: int, last: int) -> None:
        """Replace views, from position ``first`` to ``last``, that are in other memory by now.

        model.float() and p.grad.data = ... move the gradient, and so the view.
        """
        memory = self.memory
        if [*map(_pointer_of, memory.views[first:last])] != memory.pointers[first:last]:
            for position in range(first, last):
                view = memory.views[position]
                if _pointer_of(view) != memory.pointers[position]:
                    memory.views[position] = view_like(memory.buffer, self.offsets[position], view)

    def _copies_of(self, first: int, last: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return views of the memory, and the gradients to be copied to them; zero other views."""
        now, views, sources = self.now, [], []
        for position in range(first, last):
            parameter, view = self.parameters[position], self.memory.views[position]
            gradient, has_grown = gradient_of(parameter), self.accumulated[position]
            if gradient is None:
                # A Function's backward() returned None, or zero_grad() has dropped it since.
                self.accumulated[position] = 0
                view.zero_()
                continue
            views.append(view)
            sources.append(gradient if gradient.layout is torch.strided else gradient.to_dense())
            if gradient is view and not has_grown:
                now.unchanged[position] = view.clone()
            elif gradient is not view and has_grown and gradient is not now.kept.get(position):
                self.use_views(position, position + 1)
        return views, sources

    def use_mean(self, position: int) -> None:
        """Make the mean, which is in the memory, the gradient of the parameter at ``position``."""
        self.now.unchanged.pop(position, None)
        kept = self.now.kept.get(position)
        if kept is not None and gradient_of(self.parameters[position]) is kept:
            kept.copy_(self.memory.views[position])
        else:
            self.use_views(position, position + 1)

    def use_views(self, first: int, last: int) -> None:
        """Make the views from position ``first`` to ``last`` the gradients.

        Raises:
            ParameterChanged: If a parameter no longer has the shape, dtype or device it had.
        """
        parameters, views = self.parameters[first:last], self.memory.views[first:last]
        try:
            deque(map(set_gradient, parameters, views), maxlen=0)
        except RuntimeError as error:
            are_set = [*map(operator.is_, map(gradient_of, parameters), views), False]
            raise self._changed(min(first + are_set.index(False), last - 1)) from error

    def _changed(self, position: int) -> ParameterChanged:
        """Return the error for the parameter at ``position``, whose form has changed."""
        name, parameter = self.parameter_names[position], self.parameters[position]
        now = _describe(parameter, gradient_dtype(parameter))
        before = _describe(self.memory.views[position], self.plan.dtype)
        return ParameterChanged(
            f"The gradient of {name!r} is {now}, but was {before} when it was made parallel. "
            "Build the model as it is to be trained, then call parallelize() or "
            "DistributedDataParallel()."
        )


def _form_of(parameter: torch.Tensor) -> torch.Tensor:
    """A tensor without values that keeps the form that ``parameter`` has now.

    Shown by test_data_that_one_rank_alone_cuts_is_named_in_each_step.
    """
    return torch.empty_strided(parameter.shape, parameter.stride(), device="meta")


def _describe(tensor: torch.Tensor, dtype: torch.dtype) -> str:
    return f"{tuple(tensor.shape)} {str(dtype).removeprefix('torch.')} on {tensor.device}"
