"""Buckets: which gradients share one, and the buffer that is all-reduced."""

from __future__ import annotations

import itertools
import operator
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from lockstep import spans
from lockstep.comm import Pending, can_average, start_all_reduce, zero_buffer
from lockstep.errors import ParameterChanged
from lockstep.grad.comm_hook import CommHook, GradBucket, reduced_buffer, view_like
from lockstep.grad.diagnostics import naming, raise_named
from lockstep.grad.memory import (
    Memory,
    aligned,
    gradient_dtype,
    gradient_of,
    is_any_held,
    set_gradient,
    which_are_held,
)
from lockstep.torch_private import _foreach_copy_

# From this average size on, each gradient is copied and scaled in one call. Below it, the calls
# cost more than a second pass over the memory (2 us against 16 K elements).
_LARGE_NUMEL = 16 * 1024
# Smaller gradients are copied in chunks of this size.
_CHUNK_NUMEL = 128 * 1024
# The state of a gradient in one backward. AWAITED: its bucket waits for it. UNUSED: its bucket
# doesn't, as the backward probably won't compute it. READY: it has been computed. Numbers and not
# an Enum, as they are compared for each gradient of each step.
AWAITED, UNUSED, READY = 0, 1, 2
# These are: on how many ranks the backward has failed, and the sum of the numbers of these ranks.
_NUM_FAILURE_FACTS = 2
# To be mapped over gradients without a call in Python for each.
_layout_of = operator.attrgetter("layout")
_pointer_of = torch.Tensor.data_ptr
_NOTHING = nullcontext()


def without_autograd() -> AbstractContextManager[object]:
    """Return ``torch.no_grad()``, or nothing where autograd is disabled, as in most backwards."""
    return torch.no_grad() if torch.is_grad_enabled() else _NOTHING


def num_facts(num_parameters: int) -> int:
    """Return the number of elements of the facts, which follow the last bucket's gradients."""
    return num_parameters + _NUM_FAILURE_FACTS


def rows_of(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Return the gradient of ``parameter`` as a sparse tensor; without rows if there is none."""
    gradient = parameter.grad
    if gradient is None:
        indices = torch.empty(1, 0, dtype=torch.int64, device=parameter.device)
        values = parameter.new_empty(0, *parameter.shape[1:]).detach()
        return torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=False)
    return (gradient if gradient.is_sparse else gradient.to_sparse(1)).detach()


class Bucket:
    """The gradients of some parameters, side by side in one buffer.

    Between two backwards, ``parameter.grad`` of every reduced gradient IS its view of the buffer:
    nothing is copied back, and if the next backward finds it there still, autograd adds to it in
    place. See Note [Gradients that the program holds].

    Args:
        named: The parameters with their names; of one dtype, and on one device. There may be none.
        accumulated: For each parameter, 1 if its gradient has grown since its last reduction. The
            reducer goes on writing to this memory.
        start: The position of the first gradient among those of the reducer.
        tail_size: The number of elements to reserve for facts behind the gradients.
        buffers_from: The group that allocates the buffer, in memory that it reduces in place.
        is_hooked: Whether a communication hook reduces the gradients. Facts have memory of their
            own then, since the hook may resize the buffer.
        like: A parameter from which a bucket without parameters takes dtype and device.
        is_aligned: Whether each gradient begins at a multiple of ALIGNMENT elements.
    """

    # Whether ranks leave gradients to be summed on demand, and send no sums: a PendingBucket.
    is_deferred = False

    def __init__(
        self,
        named: Sequence[tuple[str, torch.nn.Parameter]],
        accumulated: memoryview,
        *,
        start: int = 0,
        tail_size: int = 0,
        buffers_from: dist.ProcessGroup | None = None,
        is_hooked: bool = False,
        like: torch.Tensor | None = None,
        is_aligned: bool = False,
    ) -> None:
        self.parameter_names = [name for name, _ in named]
        self.accumulated, self.is_hooked = accumulated, is_hooked
        # The positions of its first gradient, and of that of the next bucket.
        self.start, self.stop = start, start + len(named)
        self.parameters = [parameter for _, parameter in named]
        sizes = [p.numel() for p in self.parameters]
        if is_aligned:
            sizes = [*map(aligned, sizes)]
        numel = self.numel = sum(sizes)  # with the padding
        self._is_large = numel >= _LARGE_NUMEL * len(sizes)
        # The least number of gradients that copy_ready() copies at once.
        self.chunk = 1 if self._is_large else max(1, _CHUNK_NUMEL * len(sizes) // max(1, numel))
        self.offsets, self._tail_size = [0, *itertools.accumulate(sizes)], tail_size
        first = self.parameters[0] if named or like is None else like
        dtype, device = gradient_dtype(first), first.device
        size = numel if is_hooked else numel + tail_size
        # Whether the group averages the gradients, instead of this rank scaling them: for small
        # gradients scaling takes another pass over the memory.
        self.averages = False
        self._new_buffer = partial(torch.zeros, size, dtype=dtype, device=device)
        if buffers_from is not None:
            # A half or a quarter of a number is exact.
            is_exact = buffers_from.size().bit_count() == 1
            scales = self._is_large and is_exact
            self.averages = not scales and can_average(buffers_from, device)
            self._new_buffer = partial(zero_buffer, buffers_from, size, dtype, device)
        self._use(self._memory_in(self._new_buffer()))
        # The memory before, which the program held then; and gradients of the program's own in
        # this backward, by position, which are to have the means.
        self._former: Memory | None = None
        self._given: dict[int, torch.Tensor]
        self.reset()

    def _memory_in(self, buffer: torch.Tensor) -> Memory:
        """Return where in ``buffer`` the gradients and the facts are."""
        if self.is_hooked:
            gradients, tail = buffer, buffer.new_zeros(self._tail_size)
        else:
            gradients = buffer[: self.numel]
            tail = buffer[self.numel : self.numel + self._tail_size]
        views = [
            view_like(buffer, offset, parameter)
            for offset, parameter in zip(self.offsets, self.parameters, strict=False)
        ]
        return Memory.of(buffer, gradients, tail, views)

    def _use(self, memory: Memory) -> None:
        """Leave the gradients of the next backward in ``memory``."""
        self._memory = memory
        self._buffer, self._gradients, self.tail, self._views, self._pointers, *_ = memory

    @property
    def gradients(self) -> torch.Tensor:
        """The gradients, as a tensor of one dimension."""
        return self._gradients[: self.numel]

    def begin(self) -> None:
        """A backward begins: leave the memory of the last gradients to the program if it has any.

        See Note [Gradients that the program holds].
        """
        former, self._former = self._former, None
        if self._memory.is_free():
            return  # as in most steps
        gradients = [*map(gradient_of, self.parameters)]
        if all(map(operator.is_, gradients, self._views)):
            self._former = former
            return  # as where gradients are set to zero: all are added to
        if not self._memory.is_held(gradients):
            return
        kept = self._memory
        if former is None or not former.is_free():
            former = self._memory_in(self._new_buffer())
        for position, (gradient, view) in enumerate(zip(gradients, self._views, strict=True)):
            if gradient is view:
                with without_autograd():
                    former.views[position].copy_(view)
                kept.views[position] = self._view_at(position)
                view.data, former.views[position] = former.views[position], view
        self._use(former)
        self._former = kept

    def _view_at(self, position: int) -> torch.Tensor:
        """Return a new view of the buffer for the gradient at ``position``."""
        return view_like(self._buffer, self.offsets[position], self._views[position])

    def _leave(self, position: int) -> None:
        """Give the gradient at ``position`` memory of its own; it stays the same tensor."""
        view, self._views[position] = self._views[position], self._view_at(position)
        view.data = view.clone()

    def sum_pending(self) -> None:
        """Sum deferred gradients that have not been summed yet, before others are added to them."""

    def gradients_of_ranks(self) -> list[torch.Tensor]:
        """Return each rank's gradients of the last backward, by rank, if they are deferred."""
        return []

    def finish(self) -> None:
        """Make the reduced gradients those of the parameters: all ranks' backwards succeeded."""
        for position, gradient in self._given.items():
            gradient.copy_(self._views[position])
            set_gradient(self.parameters[position], gradient)

    def reset(self) -> None:
        """Drop the state of a backward, which is over."""
        self._work: Pending | None = None
        self._hooked: torch.futures.Future[torch.Tensor] | None = None
        # Whether this backward has launched the bucket, or skipped it as no rank uses it.
        self.is_launched = False
        # The number of gradients that this backward has yet to compute.
        self.num_missing = len(self.parameters)
        # When its last gradient came, if all have, and when it was launched.
        self._full_at = self._launched_at = 0
        # The number of gradients that were copied before the bucket was full, and the factor they
        # were multiplied by: 1 as long as the backward may add to them again.
        self._num_copied, self.copy_scale = 0, 1.0
        self._given = {}

    def copy_ready(self, states: bytearray) -> None:
        """Copy the gradients before the first missing one, although the bucket isn't full.

        They are still in the cores' caches, and autograd's memory is free again earlier.
        """
        missing = states[self.start + self._num_copied : self.stop].lstrip(bytes([READY]))
        last = len(self.parameters) - len(missing)
        if last - self._num_copied >= self.chunk:
            self._copy(self._num_copied, last, self.copy_scale)
            self._num_copied = last

    def is_full(self) -> bool:
        """Whether no gradient is missing."""
        if not self.num_missing:
            self._full_at = self._full_at or spans.now()
        return not self.num_missing

    def note_launch(self) -> None:
        """It is about to be launched."""
        self._launched_at = spans.now()

    @staticmethod
    def wait_for_all(buckets: Sequence[Bucket], group: dist.ProcessGroup) -> None:
        """Wait for the collectives of ``buckets``, and tell whoever records of their times."""
        for index, bucket in enumerate(buckets):
            try:
                bucket.wait(group)
            except RuntimeError as error:
                raise_named(error, bucket.parameter_names, group)
            if spans.recorder is not None and bucket._launched_at:
                launched = bucket._launched_at
                times = (bucket._full_at or launched, launched, spans.now())
                spans.recorder.bucket(bucket, index, times)

    @property
    def num_bytes(self) -> int:
        """The size of what is sent."""
        return self._buffer.nbytes

    def is_too_late_for(self, position: int) -> bool:
        """Whether the gradient at ``position`` in this bucket has been launched, or scaled."""
        return self.is_launched or (self.copy_scale != 1 and position < self._num_copied)

    def fill(self, scale: float) -> None:
        """Copy every gradient, times ``scale``, into the buffer; zeros for parameters without one.

        If a gradient hasn't grown since the last reduction, the parameter keeps a copy: if it
        hasn't grown on any rank, its bits must not change. Shown by
        test_gradient_nobody_touched_keeps_its_bits.

        Raises:
            ParameterChanged: If a parameter no longer has the shape, dtype or device it had.
        """
        copied = self._num_copied
        if copied:
            gradients = map(gradient_of, self.parameters[:copied])
            if not all(map(operator.is_, gradients, self._views)):
                # A hook of the program has replaced gradients since they were copied. Shown by
                # test_a_gradient_may_be_replaced_after_its_copy.
                for position in range(copied):
                    if gradient_of(self.parameters[position]) is not self._views[position]:
                        self._copy(position, position + 1, self.copy_scale)
            if self.copy_scale != scale:
                self._gradients[: self.offsets[copied]].mul_(scale)
        self._copy(copied, len(self.parameters), scale)

    def fill_with(self, value: float) -> None:
        """Fill the buffer with ``value``; gradients that are views of it are moved before."""
        for position, parameter in enumerate(self.parameters):
            if gradient_of(parameter) is self._views[position]:
                self._leave(position)
            self._views[position].fill_(value)  # not the padding between gradients, which stays 0

    def undo_copies(self) -> None:
        """Undo the scaling of gradients by a backward that has failed.

        Launched gradients are dropped instead, as a collective may still write to their memory.
        """
        if self.is_launched:
            self.drop()
        elif self.copy_scale != 1:
            self._gradients[: self.offsets[self._num_copied]].div_(self.copy_scale)
            self._num_copied = 0
            for position, gradient in self._given.items():
                set_gradient(self.parameters[position], gradient)

    def drop(self) -> None:
        """Drop the gradients of this backward, which has failed here or on another rank."""
        for position, parameter in enumerate(self.parameters):
            if self.accumulated[position] and gradient_of(parameter) is self._views[position]:
                set_gradient(parameter, None)
        self.accumulated[:] = bytes(len(self.accumulated))

    def _copy(self, first: int, last: int, scale: float) -> None:
        """Copy the gradients from position ``first`` to ``last``, times ``scale``."""
        # model.float() and p.grad.data = ... move the gradient, and so the view, to other memory.
        # Then a new view takes its place.
        if [*map(_pointer_of, self._views[first:last])] != self._pointers[first:last]:
            for position in range(first, last):
                view = self._views[position]
                if _pointer_of(view) != self._pointers[position]:
                    self._views[position] = view_like(self._buffer, self.offsets[position], view)
        views, parameters = self._views[first:last], self.parameters[first:last]
        sources: list[Any] = [*map(gradient_of, parameters)]
        if (
            not any(map(operator.is_, sources, views))
            and not any(map(operator.is_, sources, itertools.repeat(None)))
            and {*map(_layout_of, sources)} <= {torch.strided}
            and 0 not in self.accumulated[first:last].tobytes()
            and not is_any_held(sources)
        ):
            self._use_views(first, last)  # as in most steps
        else:
            views, sources = self._copies_of(first, sources)
        if self._is_large:
            for view, source in zip(views, sources, strict=True):
                torch.mul(source, scale, out=view)
            return
        if views:
            _foreach_copy_(views, sources)
        if scale != 1:
            self._gradients[self.offsets[first] : self.offsets[last]].mul_(scale)

    def _copies_of(
        self, first: int, gradients: Sequence[torch.Tensor | None]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return views of the buffer, and the gradients to be copied to them; zero other views.

        ``gradients`` are those from position ``first`` on.
        """
        views, sources = [], []
        are_held = which_are_held(gradients)
        for position, gradient in enumerate(gradients, first):
            view, has_grown = self._views[position], self.accumulated[position]
            if gradient is None:
                # A Function's backward() returned None, or zero_grad() has dropped it since.
                self.accumulated[position] = 0
                view.zero_()
                continue
            sources.append(gradient if gradient.layout is torch.strided else gradient.to_dense())
            if gradient is view and not has_grown:
                self._leave(position)
            elif gradient is not view and has_grown:
                if are_held[position - first]:
                    self._given[position] = gradient
                self._use_views(position, position + 1)
            views.append(self._views[position])
        return views, sources

    def use_as_grad(self, position: int) -> None:
        """Set the gradient of a parameter that only other ranks used: to the mean."""
        gradient = gradient_of(self.parameters[position])
        if gradient is None or gradient.layout is not torch.strided:
            self._use_views(position, position + 1)
        else:  # autograd would have added to it in one process
            gradient.copy_(self._views[position])

    def _use_views(self, first: int, last: int) -> None:
        """Make the views from position ``first`` to ``last`` the gradients.

        Raises:
            ParameterChanged: If a parameter no longer has the shape, dtype or device it had.
        """
        parameters, views = self.parameters[first:last], self._views[first:last]
        try:
            deque(map(set_gradient, parameters, views), maxlen=0)
        except RuntimeError as error:
            are_set = [*map(operator.is_, map(gradient_of, parameters), views), False]
            raise self.changed(min(first + are_set.index(False), last - 1)) from error

    def changed(self, position: int) -> ParameterChanged:
        """Return the error for the parameter at ``position``, whose form has changed."""
        name, parameter = self.parameter_names[position], self.parameters[position]
        now = _describe(parameter, gradient_dtype(parameter))
        before = _describe(self._views[position], self._buffer.dtype)
        return ParameterChanged(
            f"The gradient of {name!r} is {now}, but was {before} when it was made parallel. "
            "Build the model as it is to be trained, then call parallelize() or "
            "DistributedDataParallel()."
        )

    def launch(self, group: dist.ProcessGroup, *, average: bool = False) -> None:
        """Start the all-reduce of gradients and facts; of the facts alone if there is a hook."""
        self.is_launched = True
        op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
        self._work = start_all_reduce(group, self.tail if self.is_hooked else self._buffer, op)

    def launch_hook(self, hook: CommHook, index: int, *, is_last: bool) -> None:
        """Let ``hook`` start to reduce the gradients, but not the facts."""
        bucket = GradBucket(index, self._gradients, self.parameters, is_last=is_last)
        with spans.span("launch", "hook"):
            self._hooked = hook(bucket)
        self.is_launched = True

    def is_hook_done(self) -> bool:
        """Whether no communication hook is running on it."""
        return self._hooked is None or self._hooked.done()

    def finish_hook(self, group: dist.ProcessGroup) -> None:
        """Wait for the communication hook, if one runs, and copy its result to the buffer."""
        if self._hooked is not None:
            hooked, self._hooked = self._hooked, None
            with naming(self.parameter_names, group), spans.span("wait", "hook", self.num_bytes):
                reduced = reduced_buffer(hooked, self.numel)
            if reduced.data_ptr() != self._gradients.data_ptr():
                self.gradients.copy_(reduced.view(-1))

    def wait(self, group: dist.ProcessGroup) -> None:
        """Wait until the bucket is reduced; on a GPU, its stream waits."""
        if self._work is not None:
            work, self._work = self._work, None
            work.wait()

    def write_facts(self, accumulated: bytearray, failed_rank: int | None) -> None:
        """Write the facts: which gradients have grown on this rank, or that its backward failed."""
        used, failures = self.tail[:-_NUM_FAILURE_FACTS], self.tail[-_NUM_FAILURE_FACTS:]
        failures.zero_()
        if failed_rank is not None:
            used.zero_()
            failures.copy_(torch.tensor([1, failed_rank]))
        elif all(accumulated):
            used.fill_(1)
        else:
            used.copy_(torch.tensor(list(accumulated), dtype=used.dtype))

    def used_by_any(self) -> Sequence[float]:
        """Return for each position a number above 0 if any rank had a gradient; waits for a GPU."""
        used: list[float] = self.tail[:-_NUM_FAILURE_FACTS].tolist()
        return used

    def failed_ranks(self, divisor: int) -> tuple[int, int]:
        """Return on how many ranks the backward failed, and the sum of the numbers of these ranks.

        The reduction has divided both by ``divisor``. On a GPU they aren't read, which would wait
        for it: the result is 0, 0, and the gradients of a failed rank were NaN (or 0 for a
        communication hook, which may keep them for later steps).
        """
        if self.tail.device.type != "cpu":
            return 0, 0
        facts = self.tail[-_NUM_FAILURE_FACTS:]
        number, ranks = (facts.real if facts.is_complex() else facts).tolist()
        return round(number * divisor), round(ranks * divisor)


def _describe(tensor: torch.Tensor, dtype: torch.dtype) -> str:
    return f"{tuple(tensor.shape)} {str(dtype).removeprefix('torch.')} on {tensor.device}"
