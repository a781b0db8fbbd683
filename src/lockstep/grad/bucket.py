"""Buckets: gradients side by side in one buffer, which is all-reduced."""

from __future__ import annotations

import itertools
import operator
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from lockstep import spans
from lockstep.comm import can_average, start_all_reduce, without_wait, zero_buffer
from lockstep.errors import ParameterChanged
from lockstep.grad.comm_hook import CommHook, GradBucket, reduced_buffer, view_like
from lockstep.grad.diagnostics import naming, raise_named
from lockstep.grad.memory import (
    Memory,
    aligned,
    gradient_dtype,
    gradient_of,
    held,
    is_new,
    set_gradient,
)
from lockstep.grad.one_pass import READY, BucketPass
from lockstep.torch_private import _foreach_copy_

# From this average size on, each gradient is copied and scaled in one call. Below it, the calls
# cost more than a second pass over the memory (2 us against 16 K elements).
_LARGE_NUMEL = 16 * 1024
# Smaller gradients are copied in chunks of this size.
_CHUNK_NUMEL = 128 * 1024
# These are: on how many ranks the backward has failed, and the sum of the numbers of these ranks.
_NUM_FAILURE_FACTS = 2
# Fractions in them tell that a bucket ``is_watched``, and what the reducer is to tell.
WATCHED, TOLD = -2, -1
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


class Bucket:
    """The gradients of some parameters, side by side in one buffer.

    Between two backwards, ``parameter.grad`` of every reduced gradient IS its view of the buffer:
    nothing is copied back, and if the next backward finds it there still, autograd adds to it in
    place. A gradient that the program keeps after it is no ``parameter.grad`` any more stays as it
    is. See Note [Gradients that the program holds].

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

    # Whether ranks leave gradients to be summed on demand, and send no sums: a UnsummedBucket.
    is_deferred = False
    # Whether its gradients are to be gathered, and whether the program may see them otherwise.
    is_scattered = is_watched = False

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
        self._size = numel if is_hooked else numel + tail_size
        # Whether the group averages the gradients, instead of this rank scaling them: for small
        # gradients scaling takes another pass over the memory.
        self.averages = False
        if buffers_from is not None:
            # A half or a quarter of a number is exact.
            is_exact = buffers_from.size().bit_count() == 1
            scales = self._is_large and is_exact
            self.averages = not scales and can_average(buffers_from, device)
        self._buffers_from, self._dtype, self._device = buffers_from, dtype, device
        # The memory before this one, if the program held gradients in it at the last backward.
        self._left: Memory | None = None
        self._use(self._memory_in(self._new_buffer()))
        self._pass: BucketPass | None = None

    def _new_buffer(self) -> torch.Tensor:
        """Return zeros, in memory in which the group reduces them, if there is one."""
        if self._buffers_from is None:
            return torch.zeros(self._size, dtype=self._dtype, device=self._device)
        return zero_buffer(self._buffers_from, self._size, self._dtype, self._device)

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
        return Memory(buffer, gradients, tail, views)

    def _use(self, memory: Memory) -> None:
        """Leave the gradients of the next backward in ``memory``."""
        self._memory, self._buffer, self._gradients = memory, memory.buffer, memory.gradients
        self.tail, self._views, self._pointers = memory.tail, memory.views, memory.pointers

    def _leave_held(self, gradients: Iterable[torch.Tensor | None]) -> None:
        """Leave the memory to the program if it holds any other than ``gradients``, by position.

        Two memories take turns with a program that keeps the last gradients until it has others.
        """
        if not self._memory.is_held(gradients):
            self._left = None
            return
        left, self._left = self._left, self._memory
        nothing = itertools.repeat(None)
        is_free = left is not None and not left.is_held(nothing)
        self._use(left if left is not None and is_free else self._memory_in(self._new_buffer()))

    @property
    def gradients(self) -> torch.Tensor:
        """The gradients, as a tensor of one dimension."""
        return self._gradients[: self.numel]

    def begin(self) -> None:
        """A backward begins: gradients of the last one that the program keeps are left to it."""
        self._leave_held(map(gradient_of, self.parameters))

    @staticmethod
    def begin_all(buckets: Sequence[Bucket]) -> None:
        """Begin a backward with ``buckets``, and find the gradients that the program holds."""
        for bucket in buckets:
            bucket.begin()
        others = [(bucket, position) for bucket in buckets for position in bucket._elsewhere()]
        gradients: list[Any] = [gradient_of(bucket.parameters[at]) for bucket, at in others]
        for number in itertools.compress(range(len(others)), held(gradients)):
            bucket, position = others[number]
            bucket.now.kept[position] = gradients[number]

    @staticmethod
    def end_all(buckets: Sequence[Bucket]) -> None:
        """End a backward: all gradients that any rank used are those of their parameters."""
        scattered = [bucket for bucket in buckets if bucket.is_scattered]
        if scattered and buckets[-1].is_any_set(WATCHED):
            for bucket in scattered:
                bucket.sum_unsummed()
        for bucket in buckets:
            bucket.restore_unchanged()

    def _elsewhere(self) -> list[int]:
        """Return the positions of gradients that aren't in its memory, and are dense."""
        gradients = [*map(gradient_of, self.parameters)]
        are_there = map(operator.is_not, gradients, itertools.repeat(None))
        return [
            position
            for position in itertools.compress(range(len(gradients)), are_there)
            if gradients[position] is not self._views[position]
            and _layout_of(gradients[position]) is torch.strided
            and not is_new(self.parameters[position])
        ]

    def sum_unsummed(self) -> None:
        """Sum deferred gradients that have not been summed yet, before others are added to them."""

    def gradients_of_ranks(self) -> list[torch.Tensor]:
        """Return each rank's gradients of the last backward, by rank, if they are deferred."""
        return []

    def finish(self) -> None:
        """Make the reduced gradients those of the parameters: all ranks' backwards succeeded."""
        for position in self.now.kept:
            if self.accumulated[position]:
                self.use_as_grad(position)

    @staticmethod
    def open_passes(buckets: Sequence[Bucket]) -> None:
        """Take up what belongs to a backward, before anything in it can fail."""
        for bucket in buckets:
            bucket._pass = BucketPass(len(bucket.parameters))

    @property
    def now(self) -> BucketPass:
        """What belongs to the backward that runs."""
        assert self._pass is not None
        return self._pass

    def end(self) -> None:
        """Drop what belongs to the backward, which is over."""
        self._pass = None

    def copy_ready(self, states: bytearray) -> None:
        """Copy the gradients before the first missing one, although the bucket isn't full.

        They are still in the cores' caches, and autograd's memory is free again earlier.
        """
        now = self.now
        missing = states[self.start + now.num_copied : self.stop].lstrip(bytes([READY]))
        last = len(self.parameters) - len(missing)
        if last - now.num_copied >= self.chunk:
            self._copy(now.num_copied, last, now.copy_scale)
            now.num_copied = last

    def is_full(self) -> bool:
        """Whether no gradient is missing."""
        now = self.now
        if not now.num_missing:
            now.full_at = now.full_at or spans.now()
        return not now.num_missing

    def note_launch(self) -> None:
        """It is about to be launched."""
        self.now.launched_at = spans.now()

    @staticmethod
    def wait_for_all(buckets: Sequence[Bucket], group: dist.ProcessGroup) -> None:
        """Wait for the collectives of ``buckets``, and tell whoever records of their times."""
        for index, bucket in enumerate(buckets):
            try:
                bucket.wait(group)
            except RuntimeError as error:
                raise_named(error, bucket.parameter_names, group)
            if spans.recorder is not None and (launched := bucket.now.launched_at):
                times = (bucket.now.full_at or launched, launched, spans.now())
                spans.recorder.bucket(bucket, index, times)

    @property
    def num_bytes(self) -> int:
        """The size of what is sent."""
        return self._buffer.nbytes

    def is_too_late_for(self, position: int) -> bool:
        """Whether the gradient at ``position`` in this bucket has been launched, or scaled."""
        now = self.now
        return now.is_launched or (now.copy_scale != 1 and position < now.num_copied)

    def fill(self, scale: float) -> None:
        """Copy every gradient, times ``scale``, into the buffer; zeros for parameters without one.

        If a gradient hasn't grown since the last reduction, a copy is kept: if it hasn't grown on
        any rank, its bits must not change. Shown by test_gradient_nobody_touched_keeps_its_bits.

        Raises:
            ParameterChanged: If a parameter no longer has the shape, dtype or device it had.
        """
        copied, copy_scale = self.now.num_copied, self.now.copy_scale
        if copied:
            gradients = map(gradient_of, self.parameters[:copied])
            if not all(map(operator.is_, gradients, self._views)):
                # A hook of the program has replaced gradients since they were copied. Shown by
                # test_a_gradient_may_be_replaced_after_its_copy.
                for position in range(copied):
                    if gradient_of(self.parameters[position]) is not self._views[position]:
                        self._copy(position, position + 1, copy_scale)
            if copy_scale != scale:
                self._gradients[: self.offsets[copied]].mul_(scale)
        self._copy(copied, len(self.parameters), scale)

    def fill_with(self, value: float) -> None:
        """Fill the buffer with ``value``; another one, if the gradients in it are to stay."""
        self._leave_held(itertools.repeat(None))
        for view in self._views:
            view.fill_(value)  # not the padding between gradients, which stays 0

    def undo_copies(self) -> None:
        """Undo the scaling of gradients by a backward that has failed.

        Launched gradients are dropped instead, as a collective may still write to their memory.
        """
        now = self.now
        if now.is_launched:
            self.drop()
        elif now.copy_scale != 1:
            self._gradients[: self.offsets[now.num_copied]].div_(now.copy_scale)
            now.num_copied = 0
        self._take_unchanged()

    def _take_unchanged(self) -> None:
        """Set gradients that haven't grown to their copies: the memory has others, or will have."""
        unchanged = self.now.unchanged
        while unchanged:
            position, gradient = unchanged.popitem()
            if gradient_of(self.parameters[position]) is self._views[position]:
                set_gradient(self.parameters[position], gradient)

    def restore_unchanged(self) -> None:
        """Restore the gradients that haven't grown on any rank, once all others are used."""
        for position, gradient in self.now.unchanged.items():
            if gradient_of(self.parameters[position]) is self._views[position]:
                self._views[position].copy_(gradient)

    def drop(self) -> None:
        """Drop the gradients of this backward, which has failed here or on another rank."""
        self._take_unchanged()
        for position, parameter in enumerate(self.parameters):
            own = (self._views[position], self.now.kept.get(position))
            if self.accumulated[position] and any(gradient_of(parameter) is one for one in own):
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
            not self.now.kept
            and not any(map(operator.is_, sources, views))
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
            self._gradients[self.offsets[first] : self.offsets[last]].mul_(scale)

    def _copies_of(self, first: int, last: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return views of the buffer, and the gradients to be copied to them; zero other views."""
        now, views, sources = self.now, [], []
        for position in range(first, last):
            parameter, view = self.parameters[position], self._views[position]
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
                self._use_views(position, position + 1)
        return views, sources

    def use_as_grad(self, position: int) -> None:
        """Set the gradient of a parameter that any rank used: to the mean."""
        self.now.unchanged.pop(position, None)
        kept = self.now.kept.get(position)
        if kept is not None and gradient_of(self.parameters[position]) is kept:
            kept.copy_(self._views[position])
        else:
            self._use_views(position, position + 1)

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
        self.now.is_launched = True
        op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
        self.now.work = start_all_reduce(group, self.tail if self.is_hooked else self._buffer, op)

    def launch_hook(self, hook: CommHook, index: int, *, is_last: bool) -> None:
        """Let ``hook`` start to reduce the gradients, but not the facts."""
        bucket = GradBucket(index, self._gradients, self.parameters, is_last=is_last)
        with spans.span("launch", "hook"):
            self.now.hooked = hook(bucket)
        self.now.is_launched = True

    def is_hook_done(self) -> bool:
        """Whether no communication hook is running on it."""
        return self.now.hooked is None or self.now.hooked.done()

    def finish_hook(self, group: dist.ProcessGroup) -> None:
        """Wait for the communication hook, if one runs, and copy its result to the buffer."""
        if (hooked := self.now.hooked) is not None:
            self.now.hooked = None
            with naming(self.parameter_names, group), spans.span("wait", "hook", self.num_bytes):
                reduced = reduced_buffer(hooked, self.numel)
            if reduced.data_ptr() != self._gradients.data_ptr():
                self.gradients.copy_(reduced.view(-1))

    def wait(self, group: dist.ProcessGroup) -> None:
        """Wait until the bucket is reduced; on a GPU, its stream waits."""
        if (work := self.now.work) is not None:
            self.now.work = None
            work.wait()

    def write_facts(
        self, accumulated: bytearray, failed_rank: int | None, fractions: Sequence[float]
    ) -> None:
        """Write the facts: which gradients have grown on this rank, or that its backward failed.

        The sum of each of the ``fractions``, WATCHED and TOLD, over the ranks is less than 1/2.
        """
        used, failures = self.tail[:-_NUM_FAILURE_FACTS], self.tail[-_NUM_FAILURE_FACTS:]
        if failed_rank is not None:
            fractions, accumulated = [1, failed_rank], bytearray(len(accumulated))
        for facts, numbers in (used, accumulated), (failures, fractions):
            if len({*numbers}) < 2:  # as in most steps
                facts.fill_(next(iter(numbers), 0))
            else:
                facts.copy_(without_wait(torch.tensor([*numbers]), facts.device))

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

    def is_any_set(self, fraction: int, *, on_gpu: bool = False) -> bool:
        """Whether any rank has set a fraction; ``on_gpu`` on a GPU, where it isn't read."""
        return bool(self.tail[fraction] != 0) if self.tail.device.type == "cpu" else on_gpu


def _describe(tensor: torch.Tensor, dtype: torch.dtype) -> str:
    return f"{tuple(tensor.shape)} {str(dtype).removeprefix('torch.')} on {tensor.device}"
