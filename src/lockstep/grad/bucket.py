"""One flat buffer that is all-reduced at once, and the gradients that are views of it."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence

import torch
import torch.distributed as dist

from lockstep.comm import Pending, can_average, start_all_reduce, zero_buffer
from lockstep.errors import ParameterChanged
from lockstep.grad.assign import gradient_dtype
from lockstep.grad.comm_hook import CommHook, GradBucket, reduced_buffer, view_like
from lockstep.grad.diagnostics import naming
from lockstep.grad.ready_state import READY
from lockstep.torch_private import _foreach_copy_, _foreach_div_, _foreach_mul_, _foreach_zero_

# Gradients of this average size are copied and scaled one by one. Below it, a call costs more than
# a second pass over the memory (2 us against 16 K elements).
_LARGE_NUMEL = 16 * 1024
# Smaller gradients are copied in chunks of this size.
_CHUNK_NUMEL = 128 * 1024


class Bucket:
    """The gradients of some parameters, side by side in one buffer.

    Between two backwards, every gradient that has been reduced IS its view of the buffer: nothing
    is copied back, and if it is still the parameter's gradient in the next backward, autograd adds
    to it in place.

    Args:
        names: The names of the parameters.
        parameters: The parameters; of one dtype, and on one device. There may be none.
        accumulated: For each, 1 if its gradient has grown since it was last reduced. The owner of
            this memory goes on writing to it.
        start: The number of gradients in the buckets before this one.
        tail_size: The number of elements to reserve behind the gradients.
        buffers_from: The group to ask for memory that it reduces in place. Such memory is scarce,
            so this is for buckets that are kept. Without, the tail lies elsewhere, since a
            communication hook may resize its buffer.
        like: A tensor of the bucket's dtype and device, if there are no parameters.

    Attributes:
        parameter_names: As given, in buffer order.
        accumulated: As given.
        start: As given.
        stop: ``start`` of the next bucket.
        tail: The memory behind the gradients, for facts that travel with them.
        num_missing: The number of gradients that this backward has yet to compute.
        copies_at: The ``num_missing`` at which :meth:`copy_ready` is to be called; 0 for never.
        has_left: Whether a further gradient would be too late in this backward: the bucket was
            launched or skipped.
        averages: Whether the group had better average it: scaling small gradients takes another
            pass over the memory.
    """

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[torch.nn.Parameter],
        accumulated: memoryview,
        *,
        start: int = 0,
        tail_size: int = 0,
        buffers_from: dist.ProcessGroup | None = None,
        like: torch.Tensor | None = None,
    ) -> None:
        self.parameter_names = list(names)
        self.accumulated = accumulated
        self.start, self.stop = start, start + len(parameters)
        self._parameters = list(parameters)
        sizes = [parameter.numel() for parameter in self._parameters]
        numel = sum(sizes)
        self._is_large = numel >= _LARGE_NUMEL * len(sizes)
        self._chunk = 1 if self._is_large else max(1, _CHUNK_NUMEL * len(sizes) // max(1, numel))
        first = self._parameters[0] if like is None else like
        dtype, device = gradient_dtype(first), first.device
        if buffers_from is None:
            self.averages = False
            self._buffer = torch.zeros(numel, dtype=dtype, device=device)
            self._gradients, self.tail = self._buffer, self._buffer.new_zeros(tail_size)
        else:
            self.averages = not self._is_large and can_average(buffers_from, device)
            self._buffer = zero_buffer(buffers_from, numel + tail_size, dtype, device)
            self._gradients, self.tail = self._buffer.split([numel, tail_size])
        self._numel = numel
        self._offsets = [0, *itertools.accumulate(sizes)]
        self._views = [
            view_like(self._buffer, offset, parameter)
            for offset, parameter in zip(self._offsets, self._parameters, strict=False)
        ]
        self._pointers = [view.data_ptr() for view in self._views]
        self.reset()

    @property
    def names(self) -> str:
        """Its parameters, in words."""
        names = self.parameter_names
        if len(names) < 2:
            return "".join(map(repr, names)) or "no parameter"
        return f"{names[0]!r} to {names[-1]!r}"

    @property
    def gradients(self) -> torch.Tensor:
        """The gradients, as one tensor of one dimension."""
        return self._gradients[: self._numel]

    @property
    def num_bytes(self) -> int:
        """The size of its gradients."""
        return self._numel * self._buffer.element_size()

    def reset(self) -> None:
        """Drop the state of a backward: it is over."""
        self._work: Pending | None = None
        self._hooked: torch.futures.Future[torch.Tensor] | None = None
        self.has_left = False
        self.num_missing = len(self._parameters)
        # Which gradients have been copied before the bucket was full, times which factor, and
        # where the next chunk begins.
        self._is_copied = bytearray(len(self._parameters))
        self._copy_scale = 1.0
        self._next_chunk = self.copies_at = 0

    def copy_early(self, scale: float) -> None:
        """Copy gradients of this backward when they come, and not only when the bucket is full.

        They are still in the cores' caches then; and the memory that autograd has computed them in
        is free again long before the bucket is full.

        Args:
            scale: The factor to multiply them by; 1 if more may be added to them.
        """
        self._copy_scale = scale
        self.copies_at = max(0, self.num_missing - self._chunk)

    def await_one_less(self) -> None:
        """One of the gradients won't be computed in this backward."""
        self.num_missing -= 1
        self.copies_at = max(0, self.copies_at - 1)

    def copy_ready(self, states: bytearray) -> None:
        """Copy the next chunks, as many as can be complete; ``states`` are of all positions."""
        while self.copies_at and self.num_missing <= self.copies_at:
            first = self._next_chunk
            last = self._next_chunk = first + self._chunk
            self.copies_at = max(0, self.copies_at - self._chunk)
            if states.count(READY, self.start + first, self.start + last) == self._chunk:
                self._copy(first, last, self._copy_scale)
                self._is_copied[first:last] = b"\1" * self._chunk

    def is_too_late_for(self, position: int) -> bool:
        """Whether nothing can be added any more to the gradient at ``position`` in this bucket."""
        return self.has_left or bool(self._copy_scale != 1 and self._is_copied[position])

    def fill(self, scale: float) -> None:
        """Copy every gradient into the buffer, times ``scale``, and zeros where there is none.

        A gradient that hasn't grown since the last reduction is copied and kept as it is: if it
        hasn't on the other ranks either, it must keep its bits. Shown by
        test_gradient_nobody_touched_keeps_its_bits.

        Args:
            scale: The factor that makes the sum over the ranks a mean: mostly 1 / world_size.

        Raises:
            ParameterChanged: If a parameter no longer has the shape, dtype or device it had.
        """
        copied = bytes(self._is_copied)
        if views := self._copied_views():
            gradients = [p.grad for p in itertools.compress(self._parameters, copied)]
            if not all(map(operator.is_, gradients, views)):
                # Another hook has replaced some gradients since.
                for position in itertools.compress(range(len(copied)), copied):
                    if self._parameters[position].grad is not self._views[position]:
                        self._copy(position, position + 1, 1)
            if self._copy_scale != scale:
                _foreach_mul_(self._copied_views(), scale)
        first = copied.find(0)
        while first >= 0:
            last = copied.find(1, first)
            last = len(copied) if last < 0 else last
            self._copy(first, last, scale)
            first = copied.find(0, last)

    def fill_with(self, value: float) -> None:
        """Fill the buffer with ``value``, and move this rank's gradients to other memory."""
        for parameter, view in zip(self._parameters, self._views, strict=True):
            if parameter.grad is view:
                parameter.grad = view.clone()
        self._buffer.fill_(value)

    def undo_copies(self) -> None:
        """Restore gradients that were scaled in a backward that has failed.

        Those that were launched are dropped: a collective still writes to their memory, and no
        rank knows whether the others have launched theirs.
        """
        if self.has_left:
            self.drop()
        elif self._copy_scale != 1:
            if copied := self._copied_views():
                _foreach_div_(copied, self._copy_scale)
            self._is_copied = bytearray(len(self._parameters))

    def drop(self) -> None:
        """Drop the gradients of this backward: it failed, here or on another rank."""
        for position, parameter in enumerate(self._parameters):
            if self.accumulated[position]:
                self.accumulated[position] = 0
                if parameter.grad is self._views[position]:
                    parameter.grad = None

    def _copied_views(self) -> list[torch.Tensor]:
        return list(itertools.compress(self._views, self._is_copied))

    def _copy(self, first: int, last: int, scale: float) -> None:
        """Copy the gradients from position ``first`` to ``last``; large ones in one pass."""
        self._renew_views(first, last)
        views, parameters = self._views[first:last], self._parameters[first:last]
        sources: list[torch.Tensor] = [parameter.grad for parameter in parameters]  # type: ignore[misc]
        if _are_new(sources, views) and 0 not in self.accumulated[first:last].tobytes():
            self.use_as_grad(first, last)  # as in most steps
        else:
            views, sources = self._copies_of(first, last)
        if self._is_large:
            for view, source in zip(views, sources, strict=True):
                torch.mul(source, scale, out=view)
            return
        if views:
            _foreach_copy_(views, sources)
        if scale != 1:
            self._gradients[self._offsets[first] : self._offsets[last]].mul_(scale)

    def _copies_of(self, first: int, last: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the views to be written, and the gradients that are to be copied there."""
        views, sources, lacking = [], [], []
        for position in range(first, last):
            parameter, view = self._parameters[position], self._views[position]
            gradient = parameter.grad
            if gradient is None:
                # A Function's backward() returned None, or zero_grad() has dropped it since.
                self.accumulated[position] = 0
                lacking.append(view)
                continue
            views.append(view)
            if gradient is view:
                sources.append(view)
                if not self.accumulated[position]:
                    parameter.grad = view.clone()
            else:
                is_strided = gradient.layout is torch.strided
                sources.append(gradient if is_strided else gradient.to_dense())
                if self.accumulated[position]:
                    self.use_as_grad(position)
        if lacking:
            _foreach_zero_(lacking)
        return views, sources

    def _renew_views(self, first: int, last: int) -> None:
        """Make views anew that were given other memory.

        model.float() and p.grad.data = ... do that; the gradient is in the other memory then.
        """
        views, pointers = self._views[first:last], self._pointers[first:last]
        if [view.data_ptr() for view in views] == pointers:
            return
        for position, (view, pointer) in enumerate(zip(views, pointers, strict=True), first):
            if view.data_ptr() != pointer:
                self._views[position] = view_like(self._buffer, self._offsets[position], view)

    def use_as_grad(self, first: int, last: int | None = None) -> None:
        """Make the views from position ``first`` to ``last``, or that at ``first``, the gradients.

        Raises:
            ParameterChanged: If a parameter no longer has the shape, dtype or device it had.
        """
        position, parameters, views = first, self._parameters, self._views
        try:
            for position in range(first, first + 1 if last is None else last):
                parameters[position].grad = views[position]
        except RuntimeError as error:
            name, parameter = self.parameter_names[position], parameters[position]
            now = _describe(parameter, gradient_dtype(parameter))
            before = _describe(views[position], self._buffer.dtype)
            raise ParameterChanged(
                f"The gradient of {name!r} is {now}, but was {before} when it was made parallel. "
                "Build the model as it is to be trained, then call parallelize() or "
                "DistributedDataParallel()."
            ) from error

    def launch(self, group: dist.ProcessGroup, *, average: bool = False) -> None:
        """Start summing, or averaging, the gradients and the tail over the ranks."""
        self.has_left = True
        op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
        self._work = start_all_reduce(group, self._buffer, op)

    def launch_hook(self, hook: CommHook, index: int, *, is_last: bool) -> None:
        """Let ``hook`` reduce the gradients, but not the tail."""
        bucket = GradBucket(index, self._gradients, self._parameters, is_last=is_last)
        self._hooked = hook(bucket)
        self.has_left = True

    def launch_tail(self, group: dist.ProcessGroup) -> None:
        """Start summing the tail alone."""
        self._work = start_all_reduce(group, self.tail)

    def is_hook_done(self) -> bool:
        """Whether no communication hook is running on it."""
        return self._hooked is None or self._hooked.done()

    def finish_hook(self, group: dist.ProcessGroup) -> None:
        """Wait for the communication hook, and take over its result."""
        if self._hooked is not None:
            hooked, self._hooked = self._hooked, None
            with naming(self.names, group):
                reduced = reduced_buffer(hooked, self._numel)
            if reduced.data_ptr() != self._gradients.data_ptr():
                self.gradients.copy_(reduced.view(-1))

    def wait(self, group: dist.ProcessGroup) -> None:
        """Wait for the collective, on this device's stream if it is a GPU.

        Raises:
            CollectiveFailed: If another rank is lost, or times out.
        """
        self.finish_hook(group)
        if self._work is not None:
            work, self._work = self._work, None
            with naming(self.names, group):
                work.wait()


def make_buckets(
    names: Sequence[Sequence[str]],
    parameters: Sequence[torch.nn.Parameter],
    accumulated: bytearray,
    tail_size: int,
    buffers_from: dist.ProcessGroup | None,
) -> list[Bucket]:
    """Return a bucket for each group of ``names``, and the tail behind the last one.

    There is at least one bucket, if only for the tail; see :class:`Bucket` for the arguments.
    """
    buckets: list[Bucket] = []
    start = 0
    for number, own in enumerate(names or [[]], 1):
        bucket = Bucket(
            own,
            parameters[start : start + len(own)],
            memoryview(accumulated)[start : start + len(own)],
            start=start,
            tail_size=tail_size if number >= len(names) else 0,
            buffers_from=buffers_from,
            like=parameters[start if own else 0],
        )
        buckets.append(bucket)
        start = bucket.stop
    return buckets


def _are_new(gradients: Sequence[torch.Tensor | None], views: Sequence[torch.Tensor]) -> bool:
    """Whether all gradients are there and strided, and none is its view."""
    return (
        not any(map(operator.is_, gradients, views))
        and not any(map(operator.is_, gradients, itertools.repeat(None)))
        and {gradient.layout for gradient in gradients} <= {torch.strided}  # type: ignore[union-attr]
    )


def _describe(tensor: torch.Tensor, dtype: torch.dtype) -> str:
    return f"{tuple(tensor.shape)} {str(dtype).removeprefix('torch.')} on {tensor.device}"
