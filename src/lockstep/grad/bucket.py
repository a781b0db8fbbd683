"""Buckets: their assignment, and the buffers of gradients that are all-reduced at once."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from lockstep.comm import Pending, can_average, start_all_reduce, zero_buffer
from lockstep.errors import ParameterChanged
from lockstep.grad.comm_hook import CommHook, GradBucket, reduced_buffer, view_like
from lockstep.grad.diagnostics import naming
from lockstep.torch_private import _foreach_copy_

MIB = 1024 * 1024
# The first bucket is smaller: the sooner it is full, the sooner communication starts.
FIRST_BUCKET_BYTES = MIB
# If everything fits into four first buckets, don't split: another all-reduce costs more over Gloo
# than it hides, and as much over shared memory. See "Steps" in benchmarks/RESULTS.md.
_MIN_FIRST_BUCKETS = 4
# Gradients of this average size are copied and scaled one by one. Below it, a call costs more than
# a second pass over the memory (2 us against 16 K elements).
_LARGE_NUMEL = 16 * 1024
# Smaller gradients are copied in chunks of this size.
_CHUNK_NUMEL = 128 * 1024
# The state of a gradient in one backward: its bucket waits for it, or doesn't since the backward
# won't compute it (it may come nevertheless), or it has come. Numbers and not an Enum, as each
# gradient of each step passes here.
AWAITED, UNUSED, READY = 0, 1, 2
# The number of ranks on which the backward failed, and the sum of their numbers.
_NUM_FAILURE_FACTS = 2
# Mapped over gradients, which calls no Python function for each.
_layout_of = operator.attrgetter("layout")
# The gradient that autograd accumulates to, whatever the class of the parameter.
_slot: Any = torch.Tensor.grad
gradient_of: Callable[[torch.Tensor], torch.Tensor | None] = _slot.__get__
set_gradient: Callable[[torch.Tensor, torch.Tensor | None], None] = _slot.__set__
_pointer_of = torch.Tensor.data_ptr


def assign_buckets(
    num_bytes: Sequence[int],
    kinds: Sequence[Hashable],
    order: Sequence[int],
    *,
    cap_bytes: int,
    first_cap_bytes: int = FIRST_BUCKET_BYTES,
) -> list[list[int]]:
    """Divide gradients into buckets, in the order in which they become ready.

    A bucket holds gradients of one kind (say, one dtype and device), and is full with the gradient
    that takes it to its cap: waiting for one that fits would delay those that are ready.
    Buckets are sorted by when their last gradient is ready: they launch in index order, and an
    unfilled bucket holds up all later ones.

    Args:
        num_bytes: The size of each gradient.
        kinds: The kind of each gradient; only equal kinds share a bucket.
        order: The indices of all gradients, in the order in which they become ready.
        cap_bytes: The size from which a bucket is full.
        first_cap_bytes: The same for the first bucket, unless that is a large part of all
            gradients.

    Returns:
        The indices of each bucket's gradients. Every index is in exactly one bucket.
    """
    if sum(num_bytes[index] for index in order) < _MIN_FIRST_BUCKETS * first_cap_bytes:
        first_cap_bytes = cap_bytes
    full: list[list[int]] = []
    filling: dict[Hashable, list[int]] = {}
    filled_bytes: dict[Hashable, int] = {}
    for index in order:
        kind, size = kinds[index], num_bytes[index]
        if kind not in filling:
            filling[kind], filled_bytes[kind] = [], 0
        filling[kind].append(index)
        filled_bytes[kind] += size
        if filled_bytes[kind] >= (cap_bytes if full else min(first_cap_bytes, cap_bytes)):
            full.append(filling.pop(kind))
    position = {index: number for number, index in enumerate(order)}
    return sorted(full + list(filling.values()), key=lambda bucket: position[bucket[-1]])


def gradient_dtype(parameter: torch.Tensor) -> torch.dtype:
    """Return the dtype of a parameter's gradient: its own, unless it has a ``grad_dtype``."""
    dtype: torch.dtype | None = (
        getattr(parameter, "grad_dtype", None) if parameter.is_leaf else None
    )
    return parameter.dtype if dtype is None else dtype


def num_facts(num_parameters: int) -> int:
    """Return the number of elements that facts take behind the last bucket."""
    return num_parameters + _NUM_FAILURE_FACTS


def rows_of(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Return the gradient of ``parameter`` as a sparse tensor, of no rows if there is none."""
    gradient = parameter.grad
    if gradient is None:
        indices = torch.empty(1, 0, dtype=torch.int64, device=parameter.device)
        values = parameter.new_empty(0, *parameter.shape[1:]).detach()
        return torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=False)
    return (gradient if gradient.is_sparse else gradient.to_sparse(1)).detach()


class Memory(NamedTuple):
    """A buffer with the gradients of a bucket and, behind them, the facts."""

    buffer: torch.Tensor
    gradients: torch.Tensor  # of one dimension
    tail: torch.Tensor  # the facts; elsewhere if a communication hook takes the buffer
    views: list[torch.Tensor]  # of the gradients, each in the shape of its parameter
    pointers: list[int]  # the addresses of the views when they were made


class Bucket:
    """The gradients of some parameters, side by side in one buffer.

    Between two backwards, every gradient that has been reduced IS its view of the buffer: nothing
    is copied back, and if it is still the parameter's gradient in the next backward, autograd adds
    to it in place.

    Args:
        named: The parameters with their names; of one dtype, and on one device. There may be none.
        accumulated: For each, 1 if its gradient has grown since it was last reduced. The owner of
            this memory goes on writing to it.
        start: The number of gradients in the buckets before this one.
        tail_size: The number of elements to reserve behind the gradients, for facts.
        buffers_from: The group to ask for memory that it reduces in place, if there is one.
        is_hooked: Whether a communication hook reduces it. The tail lies elsewhere then, since the
            hook may resize the buffer.
        like: A parameter with the bucket's dtype and device, if there are none in it.
        alignment: A gradient begins at a multiple of so many elements.
    """

    # Whether ranks leave gradients to be summed on demand, and send no sums: a DeferredBucket.
    is_deferred = False
    # The number of elements behind the facts.
    num_notes = 0

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
        alignment: int = 1,
    ) -> None:
        self.parameter_names = [name for name, _ in named]
        self.accumulated, self.is_hooked = accumulated, is_hooked
        # The positions of its first gradient, and of the next bucket's.
        self.start, self.stop = start, start + len(named)
        self._parameters = [parameter for _, parameter in named]
        sizes = [p.numel() for p in self._parameters]
        if alignment > 1:
            sizes = [-(-max(size, 1) // alignment) * alignment for size in sizes]
        numel = self._numel = sum(sizes)
        self._is_large = numel >= _LARGE_NUMEL * len(sizes)
        # The number of gradients from which on copy_ready() copies them.
        self.chunk = 1 if self._is_large else max(1, _CHUNK_NUMEL * len(sizes) // max(1, numel))
        self._offsets, self._tail_size = [0, *itertools.accumulate(sizes)], tail_size
        first = self._parameters[0] if named or like is None else like
        dtype, device = gradient_dtype(first), first.device
        size = numel if is_hooked else numel + tail_size + self.num_notes
        # Whether the group averages the gradients, instead of this rank scaling them: for small
        # gradients scaling takes another pass over the memory.
        self.averages = False
        if buffers_from is None:
            buffer = torch.zeros(size, dtype=dtype, device=device)
        else:
            # A half or a quarter of a number is exact.
            is_exact = buffers_from.size().bit_count() == 1
            scales = self._is_large and is_exact
            self.averages = not scales and can_average(buffers_from, device)
            buffer = zero_buffer(buffers_from, size, dtype, device)
        self._use(self._memory_in(buffer))
        self.reset()

    def _memory_in(self, buffer: torch.Tensor) -> Memory:
        """Return where in ``buffer`` the gradients and the facts are."""
        if self.is_hooked:
            gradients, tail = buffer, buffer.new_zeros(self._tail_size)
        else:
            gradients = buffer[: self._numel]
            tail = buffer[self._numel : self._numel + self._tail_size]
        views = [
            view_like(buffer, offset, parameter)
            for offset, parameter in zip(self._offsets, self._parameters, strict=False)
        ]
        return Memory(buffer, gradients, tail, views, [view.data_ptr() for view in views])

    def _use(self, memory: Memory) -> None:
        """Leave the gradients of the next backward in ``memory``."""
        self._buffer, self._gradients, self.tail, self._views, self._pointers = memory

    @property
    def gradients(self) -> torch.Tensor:
        """The gradients, as one tensor of one dimension."""
        return self._gradients[: self._numel]

    def begin(self) -> None:
        """A backward begins."""

    def settle(self) -> None:
        """Sum the gradients that nobody has read yet: more may be added to them."""

    def gradients_of_ranks(self) -> list[torch.Tensor]:
        """Return the gradients of the last backward by rank, if they aren't summed."""
        return []

    def finish(self) -> None:
        """All ranks' backwards have succeeded: the gradients are those of its parameters."""

    def reset(self) -> None:
        """Drop the state of a backward: it is over."""
        self._work: Pending | None = None
        self._hooked: torch.futures.Future[torch.Tensor] | None = None
        # Whether it was launched or skipped in this backward.
        self.has_left = False
        # The number of gradients that this backward has yet to compute.
        self.num_missing = len(self._parameters)
        # How many gradients have been copied before the bucket is full, and their factor: 1 if more
        # may be added to them.
        self._num_copied, self.copy_scale = 0, 1.0

    def copy_ready(self, states: bytearray) -> None:
        """Copy gradients, up to the first that is missing, before the bucket is full.

        They are still in the cores' caches then, and autograd's memory is free again earlier.
        """
        missing = states[self.start + self._num_copied : self.stop].lstrip(bytes([READY]))
        last = len(self._parameters) - len(missing)
        if last - self._num_copied >= self.chunk:
            self._copy(self._num_copied, last, self.copy_scale)
            self._num_copied = last

    def is_too_late_for(self, position: int) -> bool:
        """Whether nothing can be added any more to the gradient at ``position`` in this bucket."""
        return self.has_left or (self.copy_scale != 1 and position < self._num_copied)

    def fill(self, scale: float) -> None:
        """Copy every gradient into the buffer, times ``scale``, and zeros where there is none.

        A gradient that hasn't grown since the last reduction is copied and kept as it is: if it
        hasn't on the other ranks either, it must keep its bits. Shown by
        test_gradient_nobody_touched_keeps_its_bits.
        """
        copied = self._num_copied
        if copied:
            gradients = map(gradient_of, self._parameters[:copied])
            if not all(map(operator.is_, gradients, self._views)):
                # Another hook has replaced some gradients since.
                for position in range(copied):
                    if gradient_of(self._parameters[position]) is not self._views[position]:
                        self._copy(position, position + 1, self.copy_scale)
            if self.copy_scale != scale:
                self._gradients[: self._offsets[copied]].mul_(scale)
        self._copy(copied, len(self._parameters), scale)

    def fill_with(self, value: float) -> None:
        """Fill the buffer with ``value``, and move this rank's gradients to other memory."""
        for parameter, view in zip(self._parameters, self._views, strict=True):
            if gradient_of(parameter) is view:
                set_gradient(parameter, view.clone())
            view.fill_(value)  # what is between gradients is 0 in every sum

    def undo_copies(self) -> None:
        """Restore gradients that were scaled in a backward that has failed.

        Those that were launched are dropped: a collective may still write to their memory.
        """
        if self.has_left:
            self.drop()
        elif self.copy_scale != 1:
            self._gradients[: self._offsets[self._num_copied]].div_(self.copy_scale)
            self._num_copied = 0

    def drop(self) -> None:
        """Drop the gradients of this backward: it failed, here or on another rank."""
        for position, parameter in enumerate(self._parameters):
            if self.accumulated[position] and gradient_of(parameter) is self._views[position]:
                set_gradient(parameter, None)
        self.accumulated[:] = bytes(len(self.accumulated))

    def _copy(self, first: int, last: int, scale: float) -> None:
        """Copy the gradients from position ``first`` to ``last``; large ones in one pass."""
        # model.float() and p.grad.data = ... give a view other memory; the gradient is there then.
        if [*map(_pointer_of, self._views[first:last])] != self._pointers[first:last]:
            for position in range(first, last):
                view = self._views[position]
                if _pointer_of(view) != self._pointers[position]:
                    self._views[position] = view_like(self._buffer, self._offsets[position], view)
        views, parameters = self._views[first:last], self._parameters[first:last]
        sources: list[Any] = [*map(gradient_of, parameters)]
        if (
            not any(map(operator.is_, sources, views))
            and not any(map(operator.is_, sources, itertools.repeat(None)))
            and {*map(_layout_of, sources)} <= {torch.strided}
            and 0 not in self.accumulated[first:last].tobytes()
        ):
            self._use_views(first, last)  # as in most steps
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
        views, sources = [], []
        for position in range(first, last):
            parameter, view = self._parameters[position], self._views[position]
            gradient, has_grown = gradient_of(parameter), self.accumulated[position]
            if gradient is None:
                # A Function's backward() returned None, or zero_grad() has dropped it since.
                self.accumulated[position] = 0
                view.zero_()
                continue
            views.append(view)
            sources.append(gradient if gradient.layout is torch.strided else gradient.to_dense())
            if gradient is view and not has_grown:
                set_gradient(parameter, view.clone())
            elif gradient is not view and has_grown:
                self._use_views(position, position + 1)
        return views, sources

    def use_as_grad(self, position: int) -> None:
        """Make the mean the gradient of a parameter that other ranks used, and not this one."""
        self._use_views(position, position + 1)

    def _use_views(self, first: int, last: int) -> None:
        """Make the views from position ``first`` to ``last`` the gradients.

        Raises:
            ParameterChanged: If a parameter no longer has the shape, dtype or device it had.
        """
        position, parameters, views = first, self._parameters, self._views
        try:
            for position in range(first, last):
                set_gradient(parameters[position], views[position])
        except RuntimeError as error:
            raise self.changed(position) from error

    def changed(self, position: int) -> ParameterChanged:
        """Return the error to raise if the parameter at ``position`` is another than before."""
        name, parameter = self.parameter_names[position], self._parameters[position]
        now = _describe(parameter, gradient_dtype(parameter))
        before = _describe(self._views[position], self._buffer.dtype)
        return ParameterChanged(
            f"The gradient of {name!r} is {now}, but was {before} when it was made parallel. "
            "Build the model as it is to be trained, then call parallelize() or "
            "DistributedDataParallel()."
        )

    def launch(self, group: dist.ProcessGroup, *, average: bool = False) -> None:
        """Start summing, or averaging, gradients and tail over the ranks; the tail if hooked."""
        self.has_left = True
        op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
        self._work = start_all_reduce(group, self.tail if self.is_hooked else self._buffer, op)

    def launch_hook(self, hook: CommHook, index: int, *, is_last: bool) -> None:
        """Let ``hook`` reduce the gradients, but not the tail."""
        bucket = GradBucket(index, self._gradients, self._parameters, is_last=is_last)
        self._hooked = hook(bucket)
        self.has_left = True

    def is_hook_done(self) -> bool:
        """Whether no communication hook is running on it."""
        return self._hooked is None or self._hooked.done()

    def finish_hook(self, group: dist.ProcessGroup) -> None:
        """Wait for the communication hook, and take over its result."""
        if self._hooked is not None:
            hooked, self._hooked = self._hooked, None
            with naming(self.parameter_names, group):
                reduced = reduced_buffer(hooked, self._numel)
            if reduced.data_ptr() != self._gradients.data_ptr():
                self.gradients.copy_(reduced.view(-1))

    def wait(self, group: dist.ProcessGroup) -> None:
        """Wait for the collective, on this device's stream if it is a GPU."""
        self.finish_hook(group)
        if self._work is not None:
            work, self._work = self._work, None
            with naming(self.parameter_names, group):
                work.wait()

    def write_facts(self, accumulated: bytearray, failed_rank: int | None) -> None:
        """Write which gradients this rank adds, or that its backward has failed: then none."""
        used, failures = self.tail[:-_NUM_FAILURE_FACTS], self.tail[-_NUM_FAILURE_FACTS:]
        failures.zero_()
        if failed_rank is not None:
            used.zero_()
            failures.copy_(torch.tensor([1, failed_rank]))
        elif all(accumulated):
            used.fill_(1)
        else:
            used.copy_(torch.tensor(list(accumulated), dtype=used.dtype))

    def used_by_any(self) -> list[float]:
        """Return at each position more than 0 if any rank added a gradient. Waits for a GPU."""
        used: list[float] = self.tail[:-_NUM_FAILURE_FACTS].tolist()
        return used

    def failed_ranks(self, divisor: int) -> tuple[int, int]:
        """Return how many ranks' backwards failed, and the sum of their numbers; 0, 0 on a GPU.

        Reading it would wait for the GPU. There, a rank whose backward has failed sends NaN or, to
        a communication hook, which may remember it, 0. The sums were divided by ``divisor``.
        """
        if self.tail.device.type != "cpu":
            return 0, 0
        facts = self.tail[-_NUM_FAILURE_FACTS:]
        number, ranks = (facts.real if facts.is_complex() else facts).tolist()
        return round(number * divisor), round(ranks * divisor)


def _describe(tensor: torch.Tensor, dtype: torch.dtype) -> str:
    return f"{tuple(tensor.shape)} {str(dtype).removeprefix('torch.')} on {tensor.device}"
